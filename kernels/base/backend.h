// One device as the rest of the engine sees it: memory, streams and a table of kernels.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/stream.h"

namespace heddle {

struct KernelTable;
class Backend;

enum class DeviceKind { kCpu, kCuda };

// Device memory, released by the destructor. Aligned to 128 bytes at least and readable for 128
// bytes past its end, so that kernels may load whole vectors. Move-only; must not outlive its
// Backend.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(Backend* backend, void* data, size_t bytes, bool pinned_host)
      : backend_(backend), data_(data), bytes_(bytes), pinned_host_(pinned_host) {}
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(backend_, other.backend_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(pinned_host_, other.pinned_host_);
    return *this;
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer();

  void* data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  Backend* backend_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
  bool pinned_host_ = false;
};

// A point in a stream that another stream, or the host, can wait for.
class Event {
 public:
  virtual ~Event() = default;
};

// A recorded sequence of ops that can be run again: same addresses, same shapes, new contents.
class Graph {
 public:
  virtual ~Graph() = default;
};

// Owned by one rank; calls come from its worker thread. Errors: ResourceExhausted when memory is
// short (with the bytes asked for), Unimplemented for what a device lacks.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual DeviceKind kind() const = 0;
  // Null entries are ops this device lacks; reported at start, see MissingKernels().
  virtual const KernelTable& kernels() const = 0;

  virtual absl::StatusOr<DeviceBuffer> Allocate(size_t bytes) = 0;
  // Host memory that the device can copy from asynchronously.
  virtual absl::StatusOr<DeviceBuffer> AllocatePinned(size_t bytes) = 0;
  virtual absl::StatusOr<std::unique_ptr<Stream>> CreateStream() = 0;

  // Any direction; both regions must stay valid until the stream has passed this point.
  virtual absl::Status CopyAsync(void* target, const void* source, size_t bytes,
                                 Stream& stream) = 0;
  virtual absl::Status MemsetAsync(void* target, int value, size_t bytes, Stream& stream) = 0;

  virtual absl::StatusOr<std::unique_ptr<Event>> CreateEvent() = 0;
  virtual absl::Status Record(Event& event, Stream& stream) = 0;
  virtual absl::Status Wait(Event& event, Stream& stream) = 0;

  // Between the two, ops enqueued on the stream are recorded and not run.
  virtual absl::Status BeginCapture(Stream& stream) = 0;
  virtual absl::StatusOr<std::unique_ptr<Graph>> EndCapture(Stream& stream) = 0;
  virtual absl::Status Replay(Graph& graph, Stream& stream) = 0;

 private:
  friend class DeviceBuffer;
  virtual void Free(void* data, size_t bytes, bool pinned_host) = 0;
};

}  // namespace heddle
