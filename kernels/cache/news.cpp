#include "news.h"

#include <chrono>
#include <cmath>
#include <string>
#include <thread>

#include "../sys/need.h"

namespace kt {
namespace {

constexpr double kLongest = 1.0;  // seconds, after which the caller can end the thread

}  // namespace

void wait_for_news(const News& news, double tick, double least, double most) {
  need(tick > 0 && tick <= kLongest,
       "a tick of " + std::to_string(tick) + " seconds; accepted: above 0, up to 1");
  for (const double time : {least, most})
    need(std::isfinite(time),
         "a time of " + std::to_string(time) + " seconds; accepted: a finite number");
  const auto begin = std::chrono::steady_clock::now();
  for (;;) {
    std::this_thread::sleep_for(std::chrono::duration<double>(tick));
    const double passed =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (passed >= most || passed >= kLongest) return;
    // The device writes the word, so the compiler must not keep its value.
    const int64_t now = __atomic_load_n(news.passed, __ATOMIC_RELAXED);
    if (passed >= least && now != news.known) return;
    if (news.queue && news.queue->completed() > news.completed) return;
  }
}

}  // namespace kt
