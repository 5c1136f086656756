#include "sys/cuda_driver.h"

#include <dlfcn.h>

#include <limits>
#include <stdexcept>
#include <utility>

#include "sys/need.h"

namespace kt::sys {
namespace {

std::string why() {
  const char* text = dlerror();
  return text ? text : "unknown error";
}

template <class F> void find(void* library, const std::string& name, const char* symbol, F& f) {
  f = reinterpret_cast<F>(dlsym(library, symbol));
  if (!f) throw std::runtime_error("the CUDA driver " + name + " has no " + symbol + ": " + why());
}

unsigned count(const char* name, int value, int least, int most) {
  need(value >= least && value <= most, std::string(name) + " " + std::to_string(value) +
                                            "; accepted: " + std::to_string(least) + " to " +
                                            std::to_string(most));
  return unsigned(value);
}

uint64_t checked_function(uint64_t function) {
  need(function != 0, "function 0; expected a CUfunction");
  return function;
}

std::string checked_kinds(std::string kinds) {
  need(kinds.size() <= KernelLaunch::kMaxParameters,
       std::to_string(kinds.size()) + " parameters; at most " +
           std::to_string(KernelLaunch::kMaxParameters) + " are supported");
  need(kinds.find_first_not_of("pil") == std::string::npos,
       "kinds \"" + kinds + "\"; accepted: p, i and l");
  return kinds;
}

}  // namespace

CudaContext::CudaContext(const std::string& name) {
  // Never closed: CUDA's own library holds the driver, too.
  void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error("the CUDA driver " + name + " cannot be loaded: " + why());
  find(library, name, "cuLaunchKernel", driver_.launch);
  find(library, name, "cuStreamIsCapturing", driver_.is_capturing);
  find(library, name, "cuStreamWaitValue32_v2", driver_.wait_value);  // drivers since CUDA 11.7
  find(library, name, "cuMemcpyHtoDAsync_v2", driver_.copy_to_device);
  find(library, name, "cuMemcpyDtoHAsync_v2", driver_.copy_to_host);
  find(library, name, "cuStreamSynchronize", driver_.synchronize);
  find(library, name, "cuEventCreate", driver_.create_event);
  find(library, name, "cuEventRecord", driver_.record_event);
  find(library, name, "cuEventQuery", driver_.query_event);
  find(library, name, "cuEventDestroy_v2", driver_.destroy_event);
  find(library, name, "cuCtxGetCurrent", driver_.get_context);
  find(library, name, "cuCtxPushCurrent_v2", driver_.push_context);
  find(library, name, "cuCtxPopCurrent_v2", driver_.pop_context);
  find(library, name, "cuGetErrorName", driver_.error_name);
  find(library, name, "cuGetErrorString", driver_.error_string);
  check("cuCtxGetCurrent", driver_.get_context(&context_));
  if (!context_) throw std::runtime_error("no CUDA context is current");
}

bool CudaContext::capturing(uint64_t stream) const {
  int status = 0;  // 0: no
  within([&] {
    check("cuStreamIsCapturing", driver_.is_capturing(reinterpret_cast<void*>(stream), &status));
  });
  return status != 0;
}

void CudaContext::wait(uint64_t stream, uint64_t address, uint32_t value) const {
  check_address(address, false);
  within([&] { queue_wait(stream, address, value); });
}

void CudaContext::copy(uint64_t stream, const std::vector<Copy>& copies) const {
  within([&] {
    for (const auto& copy : copies)
      check("cuMemcpyHtoDAsync",
            driver_.copy_to_device(copy.to, reinterpret_cast<const void*>(copy.from), copy.bytes,
                                   reinterpret_cast<void*>(stream)));
  });
}

void CudaContext::copy_back(uint64_t stream, const std::vector<Copy>& copies) const {
  within([&] {
    for (const auto& copy : copies)
      check("cuMemcpyDtoHAsync", driver_.copy_to_host(reinterpret_cast<void*>(copy.to), copy.from,
                                                      copy.bytes, reinterpret_cast<void*>(stream)));
  });
}

void CudaContext::synchronize(uint64_t stream) const {
  within(
      [&] { check("cuStreamSynchronize", driver_.synchronize(reinterpret_cast<void*>(stream))); });
}

void* CudaContext::create_event() const {
  constexpr unsigned kWithoutTimes = 2;  // CU_EVENT_DISABLE_TIMING
  void* event = nullptr;
  within([&] { check("cuEventCreate", driver_.create_event(&event, kWithoutTimes)); });
  return event;
}

void CudaContext::record(void* event, uint64_t stream) const {
  within([&] {
    check("cuEventRecord", driver_.record_event(event, reinterpret_cast<void*>(stream)));
  });
}

bool CudaContext::occurred(void* event) const {
  constexpr int kNotReady = 600;  // CUDA_ERROR_NOT_READY
  int result = 0;
  within([&] {
    result = driver_.query_event(event);
    if (result != kNotReady) check("cuEventQuery", result);
  });
  return result == 0;
}

void CudaContext::destroy(void* event) const noexcept {
  try {
    within([&] { driver_.destroy_event(event); });
  } catch (const std::runtime_error&) {  // of the change of the context
  }
}

void CudaContext::check_address(uint64_t address, bool or_zero) {
  if (address % sizeof(uint32_t) || (!address && !or_zero))
    throw std::invalid_argument("address " + std::to_string(address) +
                                "; expected that of a 32-bit word, a multiple of 4");
}

void CudaContext::launch(uint64_t function, const Grid& grid, unsigned threads,
                         unsigned shared_bytes, uint64_t stream, void** parameters,
                         uint64_t wait_address) const {
  within([&] {
    if (wait_address) queue_wait(stream, wait_address, 1);
    check("cuLaunchKernel",
          driver_.launch(reinterpret_cast<void*>(function), unsigned(grid.x), unsigned(grid.y),
                         unsigned(grid.z), threads, 1, 1, shared_bytes,
                         reinterpret_cast<void*>(stream), parameters, nullptr));
  });
}

void CudaContext::queue_wait(uint64_t stream, uint64_t address, uint32_t value) const {
  constexpr unsigned kUntilEqual = 1;  // CU_STREAM_WAIT_VALUE_EQ
  check("cuStreamWaitValue32",
        driver_.wait_value(reinterpret_cast<void*>(stream), address, value, kUntilEqual));
}

// Makes a call in this object's context, and restores the context that was current.
template <class Call> void CudaContext::within(Call call) const {
  void* current = nullptr;
  check("cuCtxGetCurrent", driver_.get_context(&current));
  if (current == context_) return call();
  check("cuCtxPushCurrent", driver_.push_context(context_));
  struct Pop {
    const Driver& driver;
    ~Pop() {
      void* popped = nullptr;
      driver.pop_context(&popped);
    }
  } const pop{driver_};
  call();
}

void CudaContext::check(const char* call, int result) const {
  if (result == 0) return;
  const char *name = nullptr, *text = nullptr;
  driver_.error_name(result, &name);
  driver_.error_string(result, &text);
  throw std::runtime_error(std::string(call) + " failed: " +
                           (name ? std::string(name) : "CUresult " + std::to_string(result)) +
                           (text ? std::string(", ") + text : ""));
}

KernelLaunch::KernelLaunch(uint64_t function, int threads, int shared_bytes, std::string kinds,
                           const std::string& library)
    : function_(checked_function(function)),
      threads_(count("threads", threads, 1, kMaxThreads)),
      shared_bytes_(count("shared_bytes", shared_bytes, 0, kMaxSharedBytes)),
      kinds_(checked_kinds(std::move(kinds))),
      context_(library) {}

void KernelLaunch::check_grid(const Grid& grid) {
  constexpr int64_t kMostX = std::numeric_limits<int32_t>::max(), kMost = 65535;
  if (grid.x >= 1 && grid.x <= kMostX && grid.y >= 1 && grid.y <= kMost && grid.z >= 1 &&
      grid.z <= kMost)
    return;
  const auto shown = [](int64_t x, int64_t y, int64_t z) {
    return std::to_string(x) + " x " + std::to_string(y) + " x " + std::to_string(z);
  };
  throw std::invalid_argument("a grid of " + shown(grid.x, grid.y, grid.z) +
                              " blocks; accepted: 1 to " + shown(kMostX, kMost, kMost));
}

void KernelLaunch::run(const Grid& grid, uint64_t stream, uint64_t* values,
                       uint64_t wait_address) const {
  check_grid(grid);
  void* parameters[kMaxParameters];
  for (size_t i = 0; i < kinds_.size(); ++i) parameters[i] = values + i;
  context_.launch(function_, grid, threads_, shared_bytes_, stream, parameters, wait_address);
}

}  // namespace kt::sys
