#include "kernels/cpu/cpu_backend.h"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/backend_registry.h"
#include "kernels/kernel_table.h"

namespace heddle {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class CpuBackendTest : public testing::TestWithParam<CpuStreamMode> {
 protected:
  bool deferred() const { return GetParam() == CpuStreamMode::kDeferred; }
  std::unique_ptr<Stream> NewStream() { return *backend_->CreateStream(); }
  // Enqueues a work that notes `value`, or fails with it if `fails`.
  void Note(Stream& stream, int value, bool fails = false) {
    CpuStream::From(stream).Enqueue([=, this](CpuThreadPool&) {
      if (fails) return absl::DataLossError(std::to_string(value));
      notes_.push_back(value);
      return absl::OkStatus();
    });
  }

  std::unique_ptr<Backend> backend_ =
      CreateCpuBackend({.num_threads = 2, .stream_mode = GetParam()});
  std::vector<int> notes_;
};

INSTANTIATE_TEST_SUITE_P(Modes, CpuBackendTest,
                         testing::Values(CpuStreamMode::kImmediate, CpuStreamMode::kDeferred),
                         [](const auto& mode) {
                           return mode.param == CpuStreamMode::kDeferred ? "Deferred" : "Immediate";
                         });

TEST_P(CpuBackendTest, WorkRunsInOrderAndOnlyWhenTheModeSays) {
  const auto stream = NewStream();
  Note(*stream, 1);
  Note(*stream, 2);
  if (deferred()) {
    EXPECT_THAT(notes_, IsEmpty());
  } else {
    EXPECT_THAT(notes_, ElementsAre(1, 2));
  }
  EXPECT_TRUE(stream->Synchronize().ok());
  EXPECT_THAT(notes_, ElementsAre(1, 2));
  EXPECT_TRUE(stream->Synchronize().ok());
  EXPECT_THAT(notes_, ElementsAre(1, 2));
}

TEST_P(CpuBackendTest, CopiesAreOrderedWithOtherWork) {
  const auto stream = NewStream();
  DeviceBuffer a = *backend_->Allocate(4), b = *backend_->AllocatePinned(4);
  *a.as<int32_t>() = 7;
  *b.as<int32_t>() = 0;
  ASSERT_TRUE(backend_->CopyAsync(b.data(), a.data(), 4, *stream).ok());
  int32_t seen = -1;
  CpuStream::From(*stream).Enqueue([&](CpuThreadPool&) {
    seen = *b.as<int32_t>();
    return absl::OkStatus();
  });
  ASSERT_TRUE(backend_->MemsetAsync(b.data(), 1, 4, *stream).ok());
  ASSERT_TRUE(backend_->CopyAsync(nullptr, nullptr, 0, *stream).ok());
  EXPECT_EQ(*b.as<int32_t>(), deferred() ? 0 : 0x01010101);
  // An input overwritten too early is seen by a deferred stream alone.
  *a.as<int32_t>() = 8;
  ASSERT_TRUE(stream->Synchronize().ok());
  EXPECT_EQ(seen, deferred() ? 8 : 7);
  EXPECT_EQ(*b.as<int32_t>(), 0x01010101);
}

TEST_P(CpuBackendTest, TheFirstErrorIsKeptAndTheRestDropped) {
  const auto stream = NewStream();
  Note(*stream, 1);
  Note(*stream, 2, /*fails=*/true);
  Note(*stream, 3);
  Note(*stream, 4, /*fails=*/true);
  const absl::Status status = stream->Synchronize();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(status.message(), "2");
  EXPECT_THAT(notes_, ElementsAre(1));
  Note(*stream, 5);
  EXPECT_TRUE(stream->Synchronize().ok());
  EXPECT_THAT(notes_, ElementsAre(1, 5));
}

TEST_P(CpuBackendTest, AnEventOrdersTwoStreams) {
  const auto first = NewStream(), second = NewStream();
  const auto event = *backend_->CreateEvent();
  ASSERT_TRUE(backend_->Wait(*event, *second).ok());  // Never recorded: passes.
  Note(*first, 1);
  ASSERT_TRUE(backend_->Record(*event, *first).ok());
  Note(*first, 2);
  ASSERT_TRUE(backend_->Wait(*event, *second).ok());
  Note(*second, 3);
  notes_.clear();
  ASSERT_TRUE(second->Synchronize().ok());
  if (deferred()) {
    EXPECT_THAT(notes_, ElementsAre(1, 3));  // Not 2, which follows the event.
    ASSERT_TRUE(first->Synchronize().ok());
    EXPECT_THAT(notes_, ElementsAre(1, 3, 2));
  }
}

TEST_P(CpuBackendTest, StreamsMayWaitForEachOtherInTurns) {
  const auto first = NewStream(), second = NewStream();
  const auto ping = *backend_->CreateEvent(), pong = *backend_->CreateEvent();
  for (int i = 0; i < 6; i += 2) {
    Note(*first, i);
    ASSERT_TRUE(backend_->Record(*ping, *first).ok());
    ASSERT_TRUE(backend_->Wait(*ping, *second).ok());
    Note(*second, i + 1);
    ASSERT_TRUE(backend_->Record(*pong, *second).ok());
    ASSERT_TRUE(backend_->Wait(*pong, *first).ok());
  }
  ASSERT_TRUE(first->Synchronize().ok());
  ASSERT_TRUE(second->Synchronize().ok());
  EXPECT_THAT(notes_, ElementsAre(0, 1, 2, 3, 4, 5));
}

TEST_P(CpuBackendTest, AnErrorReachesTheStreamThatWaits) {
  const auto first = NewStream(), second = NewStream();
  const auto event = *backend_->CreateEvent();
  Note(*first, 1, /*fails=*/true);
  ASSERT_TRUE(backend_->Record(*event, *first).ok());
  ASSERT_TRUE(backend_->Wait(*event, *second).ok());
  Note(*second, 2);
  EXPECT_EQ(second->Synchronize().message(), "1");
  EXPECT_EQ(first->Synchronize().message(), "1");
  EXPECT_THAT(notes_, IsEmpty());
}

TEST_P(CpuBackendTest, AnEventOutlivesItsStream) {
  const auto event = *backend_->CreateEvent();
  {
    const auto gone = NewStream();
    Note(*gone, 1);
    ASSERT_TRUE(backend_->Record(*event, *gone).ok());
  }
  const auto stream = NewStream();
  ASSERT_TRUE(backend_->Wait(*event, *stream).ok());
  EXPECT_TRUE(stream->Synchronize().ok());
  // What a stream had not run when it went is dropped.
  EXPECT_EQ(notes_.size(), deferred() ? 0u : 1u);
}

TEST_P(CpuBackendTest, ACaptureRecordsAndAReplayReadsNewContents) {
  const auto stream = NewStream();
  DeviceBuffer a = *backend_->Allocate(4), b = *backend_->Allocate(4);
  *a.as<int32_t>() = 1;
  *b.as<int32_t>() = 0;
  ASSERT_TRUE(backend_->BeginCapture(*stream).ok());
  EXPECT_FALSE(backend_->BeginCapture(*stream).ok());
  ASSERT_TRUE(backend_->CopyAsync(b.data(), a.data(), 4, *stream).ok());
  Note(*stream, 1);
  EXPECT_THAT(stream->Synchronize().message(), HasSubstr("capture"));
  std::unique_ptr<Graph> graph = *backend_->EndCapture(*stream);
  EXPECT_FALSE(backend_->EndCapture(*stream).ok());
  ASSERT_TRUE(stream->Synchronize().ok());
  EXPECT_EQ(*b.as<int32_t>(), 0);
  for (const int32_t value : {2, 3}) {
    *a.as<int32_t>() = value;
    ASSERT_TRUE(backend_->Replay(*graph, *stream).ok());
    ASSERT_TRUE(stream->Synchronize().ok());
    EXPECT_EQ(*b.as<int32_t>(), value);
  }
  ASSERT_TRUE(backend_->Replay(*graph, *stream).ok());
  graph.reset();  // The replay still runs.
  ASSERT_TRUE(stream->Synchronize().ok());
  EXPECT_THAT(notes_, ElementsAre(1, 1, 1));
}

TEST_P(CpuBackendTest, AReplayStopsAtItsFirstError) {
  const auto stream = NewStream();
  ASSERT_TRUE(backend_->BeginCapture(*stream).ok());
  Note(*stream, 1);
  Note(*stream, 2, /*fails=*/true);
  Note(*stream, 3);
  const std::unique_ptr<Graph> graph = *backend_->EndCapture(*stream);
  ASSERT_TRUE(backend_->Replay(*graph, *stream).ok());
  Note(*stream, 4);
  EXPECT_EQ(stream->Synchronize().message(), "2");
  EXPECT_THAT(notes_, ElementsAre(1));
}

TEST_P(CpuBackendTest, BuffersAreAlignedAndPaddedWithZeros) {
  for (const size_t bytes : {0, 1, 127, 128, 129, 4096}) {
    for (const bool pinned : {false, true}) {
      const auto buffer = pinned ? backend_->AllocatePinned(bytes) : backend_->Allocate(bytes);
      ASSERT_TRUE(buffer.ok());
      EXPECT_EQ(buffer->bytes(), bytes);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 128, 0u);
      for (size_t i = 0; i < 128; ++i) EXPECT_EQ(buffer->as<char>()[bytes + i], 0);
    }
  }
}

TEST_P(CpuBackendTest, RefusesWhatCannotBeAllocated) {
  for (const size_t bytes : {std::numeric_limits<size_t>::max(), size_t{1} << 62}) {
    const auto buffer = backend_->Allocate(bytes);
    EXPECT_EQ(buffer.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(buffer.status().message(), HasSubstr(std::to_string(bytes)));
  }
}

TEST(BackendRegistry, OpensTheCpuWithEveryKernel) {
  const auto backend = CreateBackend({.device = DeviceKind::kCpu});
  ASSERT_TRUE(backend.ok());
  EXPECT_EQ((*backend)->kind(), DeviceKind::kCpu);
  EXPECT_THAT(MissingKernels((*backend)->kernels()), IsEmpty());
}

TEST(BackendRegistry, SaysWhatItCannotOpen) {
  const auto cuda = CreateBackend({.device = DeviceKind::kCuda});
  EXPECT_EQ(cuda.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(cuda.status().message(), HasSubstr("--device cpu"));
  const auto no_threads = CreateBackend({.cpu = {.num_threads = 0}});
  EXPECT_THAT(no_threads.status().message(), HasSubstr("at least 1 thread, not 0"));
}

TEST(KernelTable, NamesWhatIsMissing) {
  KernelTable table = (*CreateBackend({}))->kernels();
  table.rope = nullptr;
  table.kv_copy_pages = nullptr;
  EXPECT_THAT(MissingKernels(table), ElementsAre("rope", "kv_copy_pages"));
  EXPECT_EQ(MissingKernels({}).size(), sizeof(KernelTable) / sizeof(RopeFn));
}

}  // namespace
}  // namespace heddle
