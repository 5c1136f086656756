// The CUDA driver, loaded at run time: launches kernels and queries streams.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kt::sys {

// Bytes to be copied between the device and host memory that the driver has access to.
struct Copy {
  uint64_t to, from, bytes;
};

// Blocks of a launch.
struct Grid {
  int64_t x = 1, y = 1, z = 1;
};

// The driver, and the context that was current on construction. All calls use this context,
// whatever is current in the calling thread.
class CudaContext {
 public:
  static constexpr const char* kDriver = "libcuda.so.1";

  // Throws std::runtime_error if the driver cannot be loaded or lacks an entry point, or if no
  // context is current. Tests pass another library in its place.
  explicit CudaContext(const std::string& library = kDriver);

  // Whether a graph is being captured on a stream (a CUstream as a number), or was until an error
  // ended the capture. Throws std::runtime_error with the driver's message.
  bool capturing(uint64_t stream) const;

  // Makes a stream wait, without occupying the GPU, until the 32-bit word at an address that the
  // GPU can read equals `value`. Throws as above, also if the driver does not support it.
  void wait(uint64_t stream, uint64_t address, uint32_t value) const;

  // Queues copies to the device on a stream, or back to the host, in this order. Throws as above;
  // those before the one that failed stay queued.
  void copy(uint64_t stream, const std::vector<Copy>& copies) const;
  void copy_back(uint64_t stream, const std::vector<Copy>& copies) const;

  // Returns once everything on a stream is done. Throws as above.
  void synchronize(uint64_t stream) const;

  // Events without times. One that was recorded has occurred once the stream is done with what was
  // queued before. destroy() ignores errors: the driver may have ended. Throw as above.
  void* create_event() const;
  void record(void* event, uint64_t stream) const;
  bool occurred(void* event) const;
  void destroy(void* event) const noexcept;

  // Throws std::invalid_argument for an address that wait() cannot use.
  static void check_address(uint64_t address, bool or_zero);

  // Queues blocks of a CUfunction on a stream. Unless wait_address is 0, the stream first waits for
  // 1 there. Throws as above.
  void launch(uint64_t function, const Grid& grid, unsigned threads, unsigned shared_bytes,
              uint64_t stream, void** parameters, uint64_t wait_address) const;

 private:
  struct Driver {  // CUresult and enums are ints; CUfunction, CUstream, … are pointers
    int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                  void*, void**, void**);
    int (*is_capturing)(void*, int*);
    int (*wait_value)(void*, uint64_t, uint32_t, unsigned);
    int (*copy_to_device)(uint64_t, const void*, size_t, void*);
    int (*copy_to_host)(void*, uint64_t, size_t, void*);
    int (*synchronize)(void*);
    int (*create_event)(void**, unsigned);
    int (*record_event)(void*, void*);
    int (*query_event)(void*);
    int (*destroy_event)(void*);
    int (*get_context)(void**);
    int (*push_context)(void*);
    int (*pop_context)(void**);
    int (*error_name)(int, const char**);
    int (*error_string)(int, const char**);
  };

  Driver driver_;
  void* context_ = nullptr;

  void queue_wait(uint64_t stream, uint64_t address, uint32_t value) const;
  template <class Call> void within(Call call) const;
  void check(const char* call, int result) const;
};

// A kernel of a loaded module and the types of its parameters, launched in a CudaContext.
class KernelLaunch {
 public:
  static constexpr int kMaxParameters = 32;
  static constexpr int kMaxThreads = 1024;  // of a block
  static constexpr int kMaxSharedBytes = 1 << 20;

  // function: a CUfunction. kinds: one letter per parameter, 'p' for a pointer (unsigned 64-bit),
  // 'i' for int32 or 'l' for int64. Throws std::invalid_argument, and what CudaContext throws.
  KernelLaunch(uint64_t function, int threads, int shared_bytes, std::string kinds,
               const std::string& library = CudaContext::kDriver);

  // Throws std::invalid_argument for numbers of blocks that cannot be launched.
  static void check_grid(const Grid& grid);

  const std::string& kinds() const { return kinds_; }

  // Queues blocks on a stream. Unless wait_address is 0, the stream first waits until the
  // word there is 1. values: one per parameter, in its low bytes. Throws std::runtime_error with
  // the driver's message.
  void run(const Grid& grid, uint64_t stream, uint64_t* values, uint64_t wait_address = 0) const;

 private:
  const uint64_t function_;
  const unsigned threads_, shared_bytes_;
  const std::string kinds_;
  const CudaContext context_;
};

// A launch whose arguments are known, except for some. The kernel must outlive it.
struct BoundLaunch {
  const KernelLaunch* kernel;
  Grid grid;
  uint64_t wait_address;  // see KernelLaunch::run
  uint64_t values[KernelLaunch::kMaxParameters];
  std::vector<size_t> open;  // parameters that are given at each run
};

}  // namespace kt::sys
