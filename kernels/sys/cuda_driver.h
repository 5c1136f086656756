// Kernels launched through the CUDA driver, which is neither linked nor included.
#pragma once
#include <cstdint>
#include <string>

namespace kt::sys {

// A kernel of a loaded module with the types of its parameters. It is launched in the context that
// was current when this was made, whatever is current in the launching thread.
class KernelLaunch {
 public:
  static constexpr int kMaxParameters = 32;
  static constexpr const char* kDriver = "libcuda.so.1";

  // function: a CUfunction. kinds: one letter per parameter: 'p' a pointer (64 bits, unsigned), 'i'
  // int32. Throws std::invalid_argument, and std::runtime_error where the driver cannot be loaded
  // or lacks an entry point, or no context is current. Another library stands in for it in tests.
  KernelLaunch(uint64_t function, int threads, int shared_bytes, std::string kinds,
               const std::string& library = kDriver);

  const std::string& kinds() const { return kinds_; }

  // Queues `grid` blocks on a stream (a CUstream as a number). values: one per parameter, in its
  // low bytes. Throws std::runtime_error with the driver's words.
  void run(int64_t grid, uint64_t stream, uint64_t* values) const;

 private:
  struct Driver {  // CUresult is an int; CUfunction, CUstream and CUcontext are pointers
    int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                  void*, void**, void**);
    int (*get_context)(void**);
    int (*push_context)(void*);
    int (*pop_context)(void**);
    int (*error_name)(int, const char**);
    int (*error_string)(int, const char**);
  };

  const uint64_t function_;
  const unsigned threads_, shared_bytes_;
  const std::string kinds_;
  Driver driver_;
  void* context_ = nullptr;

  void check(const char* call, int result) const;
};

}  // namespace kt::sys
