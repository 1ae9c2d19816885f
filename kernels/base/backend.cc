#include "kernels/base/backend.h"

namespace heddle {

DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) backend_->Free(data_, bytes_, pinned_host_);
}

}  // namespace heddle
