// The C ABI: translation only. Every function checks its handle and values, calls the core, and
// turns the Status into a code. No exception leaves this file, and nothing works in a forked child.
#include <cstddef>
#include <cstdint>

extern "C" {
#include "include/lightckpt.h"
}

#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <thread>
#include <utility>
#include <vector>

#include "engine.h"

using lightckpt::Bytes;
using lightckpt::Code;
using lightckpt::Engine;
using lightckpt::Status;
using lightckpt::Store;
using lightckpt::Version;

// Outlives its engine: a call that comes late, or at the same moment as close, finds it closed.
struct lckpt_store {
  std::unique_ptr<Engine> engine;
  pid_t owner;
  std::shared_mutex running;          // shared by calls, alone by close
  std::atomic<bool> closing = false;  // else calls that follow one another could keep close out
  lckpt_store* older = nullptr;       // of the closed ones, for whoever looks for leaks
};

// Keeps a store's media mapped after the store is closed.
struct lckpt_lease {
  std::shared_ptr<lightckpt::Media> media;
  pid_t owner;
};

namespace {

constexpr uint32_t kWorkersMax = 8;

static_assert(sizeof(lckpt_span) == sizeof(lightckpt::Span));
static_assert(offsetof(lckpt_span, extent) == offsetof(lightckpt::Span, extent));

thread_local std::string last_message;

std::atomic<lckpt_store*> closed_stores = nullptr;

int code_of(const Status& status) {
  last_message = status.message();
  return static_cast<int>(status.code());
}

// Runs `body` on an open store of this process, or not at all.
template <typename Body>
int with_engine(lckpt_store* store, Body body) noexcept {
  const Status closed(Code::kInvalid, "the store is closed");
  if (store == nullptr) return code_of(closed);
  if (store->owner != getpid()) {
    return code_of({Code::kInvalid, "the store was opened by process " +
                                        std::to_string(store->owner) +
                                        "; in a forked child it is inert"});
  }
  if (store->closing) return code_of(closed);
  std::shared_lock lock(store->running);
  if (store->engine == nullptr) return code_of(closed);
  try {
    return code_of(body(*store->engine));
  } catch (const std::exception&) {  // bad_alloc, or more than a vector can ever hold
    return code_of({Code::kNoSpace, "out of host memory"});
  }
}

uint32_t usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return std::clamp(static_cast<uint32_t>(CPU_COUNT(&cores)), 1u, kWorkersMax);
}

Bytes bytes_of(const void* data, uint64_t bytes) {
  return Bytes(static_cast<const std::byte*>(data), bytes);
}

Status check_op(uint32_t op) {
  if (op <= LCKPT_COPY) return {};
  return {Code::kInvalid, "there is no operation " + std::to_string(op)};
}

std::span<const lightckpt::Span> spans_of(const lckpt_span* spans, uint32_t count) {
  return {reinterpret_cast<const lightckpt::Span*>(spans), count};
}

Status open_engine(const char* path, const lckpt_options& options, lckpt_store** store) {
  lightckpt::StoreOptions wanted;
  wanted.read_only = (options.flags & LCKPT_READ_ONLY) != 0;
  wanted.create = (options.flags & LCKPT_CREATE) != 0;
  if (options.media > LCKPT_MEDIA_EMULATED) {
    return {Code::kInvalid, "there is no media " + std::to_string(options.media)};
  }
  wanted.media = static_cast<lightckpt::MediaKind>(options.media);
  if (options.catalog > LCKPT_CATALOG_PMEMOBJ) {
    return {Code::kInvalid, "there is no catalog " + std::to_string(options.catalog)};
  }
  if (options.catalog != LCKPT_CATALOG_AUTO) {
    wanted.catalog = static_cast<lightckpt::CatalogKind>(options.catalog - LCKPT_CATALOG_LINES);
  }
  if (options.slots != 0) wanted.slots = options.slots;
  if (wanted.slots < lightckpt::kSlotsMin || wanted.slots > lightckpt::kSlotsMax) {
    return {Code::kInvalid, std::to_string(wanted.slots) + " slots; a store has " +
                                std::to_string(lightckpt::kSlotsMin) + " to " +
                                std::to_string(lightckpt::kSlotsMax)};
  }
  if (options.workers > 64) {
    return {Code::kInvalid, std::to_string(options.workers) + " workers; at most 64"};
  }
  wanted.bytes = options.bytes;
  std::unique_ptr<Store> opened;
  RETURN_IF_ERROR(Store::open(path, wanted, &opened));
  const uint32_t workers = options.workers != 0 ? options.workers : usable_cores();
  auto engine = std::make_unique<Engine>(std::move(opened), workers);
  *store = new lckpt_store{std::move(engine), getpid(), {}, {}, {}};
  return {};
}

lckpt_version describe(Engine& engine, const Version& version) {
  lckpt_version out = {};
  out.version = version.slot.version;
  out.step = version.slot.step;
  out.generation = version.slot.generation;
  out.slot = version.index;
  if (engine.store().pinned_here(version.index)) out.pinned = 1;
  if (engine.store().pinned_elsewhere(version.index)) out.pinned = 2;
  out.damaged = version.damage.ok() ? 0 : 1;
  out.record_bytes = version.slot.record_bytes;
  out.manifest_bytes = version.slot.manifest_bytes;
  out.extent_count = static_cast<uint32_t>(version.layout->extent_bytes.size());
  out.area_bytes = version.layout->area_bytes;
  return out;
}

uint64_t copy_once(std::vector<std::byte>& target, const std::vector<std::byte>& source,
                   uint32_t workers) {
  struct timespec begin = {}, end = {};
  clock_gettime(CLOCK_MONOTONIC, &begin);
  std::vector<std::jthread> threads;  // joined even if the next one cannot be started
  std::atomic<uint64_t> next = 0;     // a core that is busy with other work takes less of it
  const auto copy = [&] {
    for (uint64_t at; (at = next.fetch_add(lightckpt::kChunkBytes)) < source.size();) {
      lightckpt::copy_nt(target.data() + at, source.data() + at,
                         std::min(lightckpt::kChunkBytes, source.size() - at));
    }
    lightckpt::store_fence();
  };
  for (uint32_t i = 0; i < workers; ++i) threads.emplace_back(copy);
  for (std::jthread& thread : threads) thread.join();
  clock_gettime(CLOCK_MONOTONIC, &end);
  return uint64_t(end.tv_sec - begin.tv_sec) * 1'000'000'000 + uint64_t(end.tv_nsec) -
         uint64_t(begin.tv_nsec);
}

}  // namespace

extern "C" {

const char* lckpt_errmsg(void) { return last_message.c_str(); }

int lckpt_open(const char* path, const lckpt_options* options, lckpt_store** store) {
  if (path == nullptr || options == nullptr || store == nullptr) {
    return code_of({Code::kInvalid, "a path, options and a place for the handle are needed"});
  }
  *store = nullptr;
  try {
    return code_of(open_engine(path, *options, store));
  } catch (const std::exception& error) {  // bad_alloc, or no thread could be started
    return code_of({Code::kNoSpace, std::string("cannot open the store: ") + error.what()});
  }
}

int lckpt_close(lckpt_store** store) {
  if (store == nullptr || *store == nullptr) return LCKPT_OK;
  lckpt_store* const handle = std::exchange(*store, nullptr);
  // A forked child has no workers to join, and must not unmap or unlock what its parent uses.
  if (handle->owner != getpid() || handle->closing.exchange(true)) return LCKPT_OK;
  std::unique_lock lock(handle->running);
  handle->engine.reset();
  handle->older = closed_stores.exchange(handle);
  return LCKPT_OK;
}

int lckpt_stat(lckpt_store* store, lckpt_info* info) {
  return with_engine(store, [&](Engine& engine) -> Status {
    const lightckpt::Media& media = engine.store().media();
    const Engine::Counters counters = engine.counters();
    *info = {};
    info->store_id = engine.store().header().store_id;
    info->bytes = media.size();
    info->free_bytes = engine.store().free_bytes();
    info->media = static_cast<uint32_t>(media.kind());
    info->granularity = static_cast<uint32_t>(media.granularity());
    info->emulated = media.emulated() ? 1 : 0;
    info->slots = engine.store().header().slot_count;
    info->workers = engine.workers();
    info->flush_method = static_cast<uint32_t>(media.flush_method());
    info->catalog = LCKPT_CATALOG_LINES + engine.store().header().catalog;
    info->commits = counters.commits;
    info->drops = counters.drops;
    info->bytes_persisted = counters.bytes_persisted;
    info->commit_ns = counters.commit_ns;
    return {};
  });
}

int lckpt_versions(lckpt_store* store, lckpt_version* versions, uint32_t capacity,
                   uint32_t* count) {
  return with_engine(store, [&](Engine& engine) -> Status {
    *count = 0;
    for (const Version& version : engine.store().versions()) {
      if (*count == capacity) break;
      versions[(*count)++] = describe(engine, version);
    }
    return {};
  });
}

int lckpt_view(lckpt_store* store, uint64_t version, const void** manifest,
               uint64_t* manifest_bytes, const void** host, uint64_t* host_bytes) {
  return with_engine(store, [&](Engine& engine) -> Status {
    Version found;
    const uint32_t* table = nullptr;
    Bytes host_state;
    RETURN_IF_ERROR(engine.store().find(version, &found));
    RETURN_IF_ERROR(engine.store().read_record(found, &table, &host_state));
    *manifest = found.blob.data();
    *manifest_bytes = found.blob.size();
    *host = host_state.data();
    *host_bytes = host_state.size();
    return engine.store().media().check();
  });
}

int lckpt_locate(lckpt_store* store, uint64_t version, uint32_t extent, void** memory,
                 uint64_t* bytes) {
  return with_engine(store, [&](Engine& engine) -> Status {
    std::span<std::byte> found;
    RETURN_IF_ERROR(engine.store().locate(version, extent, &found));
    *memory = found.data();
    *bytes = found.size();
    return {};
  });
}

int lckpt_hold(lckpt_store* store, lckpt_lease** lease) {
  if (lease == nullptr) return code_of({Code::kInvalid, "a place for the lease is needed"});
  *lease = nullptr;
  return with_engine(store, [&](Engine& engine) -> Status {
    *lease = new lckpt_lease{engine.store().share_media(), getpid()};
    return {};
  });
}

int lckpt_let_go(lckpt_lease** lease) {
  if (lease == nullptr || *lease == nullptr) return LCKPT_OK;
  lckpt_lease* const held = std::exchange(*lease, nullptr);
  // In a forked child it stays: what its parent has mapped, a child does not unmap.
  if (held->owner == getpid()) delete held;
  return LCKPT_OK;
}

int lckpt_pin(lckpt_store* store, uint64_t version, int pinned) {
  return with_engine(store, [&](Engine& e) { return e.store().pin(version, pinned != 0); });
}

int lckpt_rebase(lckpt_store* store, uint64_t version) {
  return with_engine(store, [&](Engine& engine) { return engine.rebase(version); });
}

int lckpt_begin(lckpt_store* store, uint64_t step, uint32_t keep, const uint64_t* extents,
                uint32_t extent_count, const void* blob, uint64_t blob_bytes, uint64_t host_bytes) {
  return with_engine(store, [&](Engine& engine) {
    return engine.begin(step, keep, std::vector<uint64_t>(extents, extents + extent_count),
                        bytes_of(blob, blob_bytes), host_bytes);
  });
}

int lckpt_submit(lckpt_store* store, uint32_t op, uint64_t version, const lckpt_span* spans,
                 uint32_t count, uint64_t* batch) {
  return with_engine(store, [&](Engine& engine) -> Status {
    RETURN_IF_ERROR(check_op(op));
    return engine.submit(static_cast<lightckpt::Op>(op), version, spans_of(spans, count), batch);
  });
}

int lckpt_open_device(lckpt_store* store, uint32_t ordinal, uint64_t staging_bytes,
                      lckpt_device* device) {
  return with_engine(store, [&](Engine& engine) -> Status {
    const lightckpt::CudaDriver* driver = nullptr;
    lightckpt::DeviceInfo info;
    RETURN_IF_ERROR(lightckpt::CudaDriver::load(&driver));
    RETURN_IF_ERROR(engine.open_device(*driver, static_cast<int>(ordinal), {staging_bytes}, &info));
    *device = {};
    std::strncpy(device->name, info.name.c_str(), sizeof(device->name) - 1);
    device->driver = static_cast<uint32_t>(info.driver_version);
    device->direct = info.direct.ok() ? 1 : 0;
    device->staging_bytes = info.ring_bytes;
    std::strncpy(device->why_not, info.direct.message().c_str(), sizeof(device->why_not) - 1);
    return {};
  });
}

int lckpt_submit_on(lckpt_store* store, const lckpt_on_device* on, uint32_t op, uint64_t version,
                    const lckpt_span* spans, uint32_t count, uint64_t* batch) {
  return with_engine(store, [&](Engine& engine) -> Status {
    RETURN_IF_ERROR(check_op(op));
    if (on->how > LCKPT_DEVICE) {
      return {Code::kInvalid, "there is no way " + std::to_string(on->how) + " out of a device"};
    }
    const lightckpt::OnDevice where = {static_cast<int>(on->ordinal), on->stream,
                                       static_cast<lightckpt::Snapshot>(on->how)};
    return engine.submit_on(where, static_cast<lightckpt::Op>(op), version, spans_of(spans, count),
                            batch);
  });
}

int lckpt_stream_wait(lckpt_store* store, uint64_t batch, uint64_t stream, int64_t timeout_ns) {
  return with_engine(store,
                     [&](Engine& engine) { return engine.stream_wait(batch, stream, timeout_ns); });
}

int lckpt_wait(lckpt_store* store, uint64_t batch, int64_t timeout_ns, lckpt_report* report) {
  return with_engine(store, [&](Engine& engine) {
    lightckpt::Report done;
    Status status = engine.wait(batch, timeout_ns, &done);
    report->bytes = done.bytes;
    report->submit_ns = done.submit_ns;
    report->start_ns = done.start_ns;
    report->end_ns = done.end_ns;
    report->bad_count = done.bad_count;
    std::ranges::copy(done.bad, report->bad);
    report->in_place = done.in_place ? 1 : 0;
    return status;
  });
}

int lckpt_commit(lckpt_store* store, const void* host, uint64_t host_bytes, uint64_t* batch) {
  return with_engine(store, [&](Engine& engine) {
    return engine.queue_commit(bytes_of(host, host_bytes), batch);
  });
}

int lckpt_drop(lckpt_store* store, int64_t timeout_ns) {
  return with_engine(store, [&](Engine& engine) { return engine.drop(timeout_ns); });
}

int lckpt_calibrate(uint64_t bytes, uint32_t workers, uint64_t* copy_ns) {
  try {
    const uint32_t threads = workers != 0 ? std::min(workers, 64u) : usable_cores();
    std::vector<std::byte> source(bytes, std::byte{1}), target(bytes, std::byte{2});
    std::array<uint64_t, 3> times;
    for (uint64_t& time : times) time = copy_once(target, source, threads);
    std::ranges::sort(times);
    *copy_ns = times[1];
    return code_of({});
  } catch (const std::exception& error) {
    return code_of({Code::kNoSpace, std::string("cannot calibrate: ") + error.what()});
  }
}

}  // extern "C"
