#include "parallel/world_mpi.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <mpi.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status_macros.h"
#include "parallel/host_world.h"

namespace heddle {
namespace {

// MPI counts are ints.
constexpr int64_t kMaxMessagePart = int64_t{1} << 30;

// The error of an MPI call: which call, on which rank, and what MPI says.
absl::Status MpiError(absl::string_view call, int rank, int code) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  return absl::InternalError(absl::StrCat("rank ", rank, ": ", call, " failed: ", text));
}

#define RETURN_IF_MPI_ERROR(call, rank, ...)                                     \
  do {                                                                           \
    const int heddle_code = call(__VA_ARGS__);                                   \
    if (heddle_code != MPI_SUCCESS) return MpiError(#call, (rank), heddle_code); \
  } while (false)

bool MpiIsFinalized() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized != 0;
}

// The duplicate of MPI_COMM_WORLD and the ranks of a node. Kept by whatever sends or maps.
struct MpiGroups {
  MPI_Comm world = MPI_COMM_NULL;
  MPI_Comm node = MPI_COMM_NULL;
  int rank = 0;
  int size = 1;
  int node_rank = 0;
  int node_size = 1;
};

class MpiTransfer : public Transfer {
 public:
  MpiTransfer(int rank, bool receives) : rank_(rank), receives_(receives) {}

  ~MpiTransfer() override {
    if (done_ || MpiIsFinalized()) return;
    for (MPI_Request& request : requests_) {
      if (request == MPI_REQUEST_NULL) continue;
      // The job is over; nothing may wait for a peer here.
      int completed = 0;
      if (receives_) MPI_Cancel(&request);
      MPI_Test(&request, &completed, MPI_STATUS_IGNORE);
      if (completed == 0) MPI_Request_free(&request);
    }
  }

  // Starts all parts. `start` is MPI_Isend or MPI_Irecv on (data, count, request).
  template <typename Start>
  absl::Status Begin(absl::string_view call, std::byte* data, int64_t bytes, Start start) {
    do {
      const int64_t part = std::min(bytes, kMaxMessagePart);
      const int code = start(data, static_cast<int>(part), &requests_.emplace_back());
      if (code != MPI_SUCCESS) {
        requests_.pop_back();
        return MpiError(call, rank_, code);
      }
      data += part;
      bytes -= part;
    } while (bytes > 0);
    return absl::OkStatus();
  }

  absl::StatusOr<bool> Test() override {
    if (done_) return true;
    int completed = 0;
    RETURN_IF_MPI_ERROR(MPI_Testall, rank_, static_cast<int>(requests_.size()), requests_.data(),
                        &completed, MPI_STATUSES_IGNORE);
    done_ = completed != 0;
    return done_;
  }

 private:
  const int rank_;
  const bool receives_;
  std::vector<MPI_Request> requests_;
  bool done_ = false;
};

class MpiLink : public PeerLink {
 public:
  explicit MpiLink(std::shared_ptr<const MpiGroups> groups) : groups_(std::move(groups)) {}

  absl::StatusOr<std::unique_ptr<Transfer>> Send(int peer, int tag, const void* data,
                                                 int64_t bytes) override {
    auto transfer = std::make_unique<MpiTransfer>(groups_->rank, /*receives=*/false);
    auto* first = const_cast<std::byte*>(static_cast<const std::byte*>(data));
    RETURN_IF_ERROR(transfer->Begin(
        "MPI_Isend", first, bytes, [&](std::byte* part, int count, MPI_Request* request) {
          return MPI_Isend(part, count, MPI_BYTE, peer, tag, groups_->world, request);
        }));
    return transfer;
  }

  absl::StatusOr<std::unique_ptr<Transfer>> Recv(int peer, int tag, void* data,
                                                 int64_t bytes) override {
    auto transfer = std::make_unique<MpiTransfer>(groups_->rank, /*receives=*/true);
    RETURN_IF_ERROR(transfer->Begin("MPI_Irecv", static_cast<std::byte*>(data), bytes,
                                    [&](std::byte* part, int count, MPI_Request* request) {
                                      return MPI_Irecv(part, count, MPI_BYTE, peer, tag,
                                                       groups_->world, request);
                                    }));
    return transfer;
  }

 private:
  const std::shared_ptr<const MpiGroups> groups_;
};

std::string HostName() {
  char name[HOST_NAME_MAX + 1] = "";
  gethostname(name, sizeof(name) - 1);
  return name;
}

// "eth0 10.0.0.5, docker0 172.17.0.1".
std::string NetworkInterfaces() {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "unknown";
  std::vector<std::string> names;
  for (const ifaddrs* i = all; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != AF_INET) continue;
    char text[INET_ADDRSTRLEN] = "";
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(i->ifa_addr)->sin_addr, text,
              sizeof(text));
    names.push_back(absl::StrCat(i->ifa_name, " ", text));
  }
  freeifaddrs(all);
  return absl::StrJoin(names, ", ");
}

// The first contact of all ranks, with a deadline: later MPI calls of the set-up have none.
absl::Status MeetAllRanks(int rank, double timeout_seconds) {
  MPI_Request request;
  RETURN_IF_MPI_ERROR(MPI_Ibarrier, rank, MPI_COMM_WORLD, &request);
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    int completed = 0;
    RETURN_IF_MPI_ERROR(MPI_Test, rank, &request, &completed, MPI_STATUS_IGNORE);
    if (completed != 0) return absl::OkStatus();
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    if (waited.count() > timeout_seconds) {
      return absl::DeadlineExceededError(absl::StrCat(
          "rank ", rank, " (", HostName(), ") has not met all other ranks within ", timeout_seconds,
          " s: one of them did not get here, or MPI talks over a network that ",
          "does not join the hosts. Interfaces here: ", NetworkInterfaces(),
          ". With Open MPI choose one by OMPI_MCA_btl_tcp_if_include=NAME, or rule one out by ",
          "OMPI_MCA_btl_tcp_if_exclude=NAME"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// All ranks fail if one does, so that none waits for it.
absl::Status Agree(const MpiGroups& groups, const absl::Status& own) {
  int ok = own.ok() ? 1 : 0;
  int all_ok = 0;
  RETURN_IF_MPI_ERROR(MPI_Allreduce, groups.rank, &ok, &all_ok, 1, MPI_INT, MPI_MIN, groups.world);
  if (!own.ok() || all_ok != 0) return own;
  return absl::AbortedError("another rank could not set up its shared memory");
}

absl::StatusOr<std::vector<RankPlace>> GatherPlaces(const MpiGroups& groups, int first_of_node) {
  struct Card {
    int first_of_node;  // world rank
    int node_rank;
    char host[HOST_NAME_MAX + 1];
  };
  Card own = {first_of_node, groups.node_rank, ""};
  const std::string host = HostName();
  std::memcpy(own.host, host.data(), host.size());
  std::vector<Card> cards(groups.size);
  RETURN_IF_MPI_ERROR(MPI_Allgather, groups.rank, &own, sizeof(Card), MPI_BYTE, cards.data(),
                      sizeof(Card), MPI_BYTE, groups.world);
  std::vector<RankPlace> places;
  std::vector<int> firsts;  // of each node, in the order of their lowest rank
  for (const Card& card : cards) {
    auto node = std::find(firsts.begin(), firsts.end(), card.first_of_node);
    if (node == firsts.end()) node = firsts.insert(firsts.end(), card.first_of_node);
    places.push_back({static_cast<int>(node - firsts.begin()), card.node_rank, card.host});
  }
  return places;
}

// Whether the ranks of this machine are more than the CPUs that they may use together.
absl::StatusOr<bool> RanksOutnumberCpus(MPI_Comm machine, int rank) {
  cpu_set_t own, together;
  CPU_ZERO(&own);
  sched_getaffinity(0, sizeof(own), &own);
  RETURN_IF_MPI_ERROR(MPI_Allreduce, rank, &own, &together, sizeof(own), MPI_BYTE, MPI_BOR,
                      machine);
  int num_ranks = 0;
  RETURN_IF_MPI_ERROR(MPI_Comm_size, rank, machine, &num_ranks);
  return num_ranks > CPU_COUNT(&together);
}

// The window of a node, mapped by all its ranks and laid out by the first.
absl::StatusOr<std::shared_ptr<void>> MapWindow(const std::shared_ptr<const MpiGroups>& groups,
                                                const std::vector<RankPlace>& places) {
  const int node = places[groups->rank].node;
  const size_t bytes = HostWindowBytes(places, node);
  absl::Status room;
  struct statvfs shm;
  if (groups->node_rank == 0 && groups->node_size > 1 && statvfs("/dev/shm", &shm) == 0) {
    room = CheckSharedMemoryRoom(shm.f_bavail * shm.f_frsize, bytes);
  }
  RETURN_IF_ERROR(Agree(*groups, room));

  if (groups->node_size == 1) {
    std::shared_ptr<void> memory = AllocateHeapWindow(bytes);
    FormatHostWindow(memory.get(), places, node);
    return memory;
  }

  MPI_Win window;
  void* base = nullptr;
  const MPI_Aint own_bytes = groups->node_rank == 0 ? bytes + kCacheLineBytes : 0;
  RETURN_IF_MPI_ERROR(MPI_Win_allocate_shared, groups->rank, own_bytes, 1, MPI_INFO_NULL,
                      groups->node, &base, &window);
  MPI_Aint first_bytes = 0;
  int unit = 0;
  RETURN_IF_MPI_ERROR(MPI_Win_shared_query, groups->rank, window, 0, &first_bytes, &unit, &base);
  const auto address = reinterpret_cast<uintptr_t>(base);
  void* aligned = static_cast<std::byte*>(base) + (RoundUpToCacheLine(address) - address);
  if (groups->node_rank == 0) FormatHostWindow(aligned, places, node);
  RETURN_IF_MPI_ERROR(MPI_Barrier, groups->rank, groups->node);

  return std::shared_ptr<void>(aligned, [groups, window](void* memory) mutable {
    // Freeing is collective: a job that was aborted leaves it to the end of the process.
    if (MpiIsFinalized() || NodeWindow::IsAborted(memory)) return;
    MPI_Win_free(&window);
  });
}

absl::StatusOr<std::shared_ptr<const MpiGroups>> MakeGroups(const MpiWorldOptions& options,
                                                            bool* ranks_outnumber_cpus) {
  auto groups = std::make_shared<MpiGroups>();
  MPI_Comm_rank(MPI_COMM_WORLD, &groups->rank);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  RETURN_IF_ERROR(MeetAllRanks(groups->rank, options.progress_timeout_seconds));
  const int rank = groups->rank;
  // Duplicates inherit the error handler.
  RETURN_IF_MPI_ERROR(MPI_Comm_dup, rank, MPI_COMM_WORLD, &groups->world);
  RETURN_IF_MPI_ERROR(MPI_Comm_size, rank, groups->world, &groups->size);
  RETURN_IF_MPI_ERROR(MPI_Comm_split_type, rank, groups->world, MPI_COMM_TYPE_SHARED, 0,
                      MPI_INFO_NULL, &groups->node);
  ASSIGN_OR_RETURN(*ranks_outnumber_cpus, RanksOutnumberCpus(groups->node, rank));
  if (options.ranks_per_node > 0) {
    MPI_Comm machine = groups->node;
    RETURN_IF_MPI_ERROR(MPI_Comm_split, rank, machine, rank / options.ranks_per_node, 0,
                        &groups->node);
    MPI_Comm_free(&machine);
  }
  RETURN_IF_MPI_ERROR(MPI_Comm_rank, rank, groups->node, &groups->node_rank);
  RETURN_IF_MPI_ERROR(MPI_Comm_size, rank, groups->node, &groups->node_size);
  return groups;
}

}  // namespace

absl::StatusOr<World> JoinMpiWorld(const MpiWorldOptions& options) {
  int initialized = 0, thread_level = MPI_THREAD_SINGLE;
  MPI_Initialized(&initialized);
  if (initialized != 0) MPI_Query_thread(&thread_level);
  if (thread_level < MPI_THREAD_MULTIPLE) {
    return absl::FailedPreconditionError(
        "MPI must be initialised with MPI_THREAD_MULTIPLE: this MPI library does not offer it, or "
        "MPI_Init_thread was not asked for it");
  }
  bool ranks_outnumber_cpus = false;
  ASSIGN_OR_RETURN(const std::shared_ptr<const MpiGroups> groups,
                   MakeGroups(options, &ranks_outnumber_cpus));
  int first_of_node = groups->rank;
  RETURN_IF_MPI_ERROR(MPI_Bcast, groups->rank, &first_of_node, 1, MPI_INT, 0, groups->node);
  ASSIGN_OR_RETURN(const std::vector<RankPlace> places, GatherPlaces(*groups, first_of_node));
  ASSIGN_OR_RETURN(std::shared_ptr<void> window, MapWindow(groups, places));

  HostWorldOptions host_options;
  host_options.progress_timeout_seconds = options.progress_timeout_seconds;
  host_options.yields = ranks_outnumber_cpus;
  host_options.terminate_job = [groups] { MPI_Abort(groups->world, 1); };
  return MakeHostWorld(groups->rank, places, std::move(window), std::make_unique<MpiLink>(groups),
                       host_options);
}

}  // namespace heddle
