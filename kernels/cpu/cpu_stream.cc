#include "kernels/base/logging.h"
#include "kernels/cpu/cpu_backend.h"

namespace heddle {

CpuStream& CpuStream::From(Stream& stream) {
  auto* cpu_stream = dynamic_cast<CpuStream*>(&stream);
  CHECK(cpu_stream != nullptr) << "a CPU op was given the stream of another device";
  return *cpu_stream;
}

}  // namespace heddle
