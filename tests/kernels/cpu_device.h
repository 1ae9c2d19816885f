// A CPU backend with one stream, and the copies that tests of ops make.
#pragma once

#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/backend_registry.h"
#include "kernels/kernel_table.h"

namespace heddle {

class CpuDevice {
 public:
  explicit CpuDevice(int num_threads = 1, CpuStreamMode mode = CpuStreamMode::kImmediate)
      : backend_(*CreateBackend(
            {.cpu = {.num_threads = num_threads, .oversubscribed = true, .stream_mode = mode}})),
        stream_(*backend_->CreateStream()) {}

  Backend& backend() { return *backend_; }
  Stream& stream() { return *stream_; }
  const KernelTable& kernels() { return backend_->kernels(); }

  // Device memory with the bytes of `values`; it lives as long as the device.
  template <typename T>
  T* Upload(const std::vector<T>& values) {
    buffers_.push_back(*backend_->Allocate(values.size() * sizeof(T)));
    if (!values.empty()) {
      std::memcpy(buffers_.back().data(), values.data(), values.size() * sizeof(T));
    }
    return buffers_.back().template as<T>();
  }

  // Synchronises, which must succeed.
  void Synchronize() {
    const absl::Status status = stream_->Synchronize();
    ASSERT_TRUE(status.ok()) << status;
  }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
  std::vector<DeviceBuffer> buffers_;
};

inline std::vector<float> RandomFloats(int64_t count, std::mt19937& random, float scale = 1.0f) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

}  // namespace heddle
