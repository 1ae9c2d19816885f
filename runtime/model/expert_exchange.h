// How tokens travel to the ranks that hold their experts, and back.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/backend.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "parallel/communicator.h"
#include "parallel/shard_spec.h"
#include "runtime/model/activation.h"
#include "runtime/model/step_inputs.h"

namespace heddle {

// A round sends each of a few own tokens once to every rank that holds an expert chosen by it,
// lets the caller compute there, and adds up what the ranks give back, in rank order. All ranks
// make the same rounds; a rank may have no tokens in one.
//
// Who gets what is known when the router has run, so Send waits for the stream, twice: once for the
// choices and once for the counts. Owned by the decoder; `world` and `backend` outlive it.
class ExpertExchange {
 public:
  // experts[r] are those that rank r holds; each is held once. A token chooses `top_k` of them. A
  // round gives a rank at most `max_received` tokens, or one of each rank if that is more.
  static absl::StatusOr<std::unique_ptr<ExpertExchange>> Create(std::vector<Range> experts,
                                                                int64_t top_k, int64_t hidden_size,
                                                                int64_t max_received,
                                                                Communicator& world,
                                                                Backend& backend);

  // Of a round.
  int64_t max_own_tokens() const { return max_own_tokens_; }

  // Sends rows of x [own tokens, hidden] by expert_ids [own tokens, top_k], on the device. The
  // result [received tokens, hidden] is overwritten by the next call.
  absl::StatusOr<ConstMatrixView> Send(ConstMatrixView x, const int32_t* expert_ids,
                                       Stream& stream);
  // [received tokens, hidden], where the caller leaves its summand for each.
  MatrixView summands() const { return summands_.Rows(Sum(received_)); }
  // Ends the round: out[t] = (add ? out[t] : 0) + the ranks' summands of own token t.
  absl::Status Return(bool add, MatrixView out, Stream& stream);

 private:
  ExpertExchange(std::vector<Range> experts, int64_t top_k, int64_t hidden_size,
                 int64_t max_received, Communicator& world, Backend& backend);

  static int64_t Sum(const std::vector<int64_t>& counts);
  // Of as many rows for each rank.
  std::vector<int64_t> Bytes(const std::vector<int64_t>& counts) const;
  // Sets sent_ and the host side of entry_of_, rows_ and counts_ for the tokens' choices.
  void Deal(const int32_t* expert_ids, int64_t num_tokens);

  const std::vector<Range> experts_;  // [ranks]
  const int64_t top_k_;
  const int64_t hidden_size_;
  const int64_t max_own_tokens_;
  Communicator& world_;
  Backend& backend_;

  DeviceBuffer host_ids_;         // pinned int32 [own tokens, top_k]
  StepArray<int32_t> rows_;       // [sent] own token of each row sent
  StepArray<int32_t> entry_of_;   // [own tokens, ranks] its row among those sent, or -1
  DeviceBuffer ones_;             // float [own tokens, ranks]
  StepArray<int32_t> counts_;     // [ranks] rows sent to each
  DeviceBuffer received_counts_;  // int32 [ranks]
  DeviceBuffer host_counts_;      // pinned int32 [ranks]
  Activation sent_rows_;          // [sent, hidden], and what comes back
  Activation received_rows_;      // [received, hidden]
  Activation summands_;           // [received, hidden]
  // Of the round.
  std::vector<int64_t> sent_, received_;  // [ranks] rows
};

}  // namespace heddle
