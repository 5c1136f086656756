// How the thread of the live expert cache waits for something to do.
#pragma once
#include <cstdint>

#include "../sys/cuda_work.h"

namespace kt {

// What may happen while the thread waits.
struct News {
  const int64_t* passed;    // a word that the device changes
  int64_t known;            // its value until then
  sys::UploadQueue* queue;  // nullptr: no upload is under way
  int64_t completed;        // uploads of which is known that they are complete
};

// Sleeps for a tick, and again until `most` seconds have passed, another upload is complete, or,
// after `least` seconds, the word has changed. Throws what UploadQueue::completed throws.
void wait_for_news(const News& news, double tick, double least, double most);

}  // namespace kt
