// An engine on test media, and the few lines that every test of it would repeat. Waits end at the
// deadline: a hang is a failure that names its batch.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "engine.h"
#include "store_helpers.h"
#include "test_media.h"

namespace lightckpt {

inline constexpr int64_t kDeadlineNs = std::chrono::nanoseconds(kDeadline).count();

// One span per extent; the state must outlive the batch.
inline std::vector<Span> spans_of(const State& state) {
  std::vector<Span> spans;
  for (size_t i = 0; i < state.extents.size(); ++i) {
    auto* memory = const_cast<std::byte*>(state.extents[i].data());
    spans.push_back({memory, static_cast<uint32_t>(i), 0});
  }
  return spans;
}

// A state of the same shape with other bytes, to read into.
inline State blank(const State& like) {
  State state = like;
  for (Buffer& extent : state.extents) std::ranges::fill(extent, std::byte{0xee});
  return state;
}

class TestEngine {
 public:
  explicit TestEngine(uint32_t workers = 2, Granularity granularity = Granularity::kVolatile,
                      uint64_t capacity = 16 << 20) {
    auto owned = std::make_unique<TestMedia>(512 * 1024, capacity, granularity);
    media = owned.get();
    std::unique_ptr<Store> store;
    EXPECT_TRUE(is_ok(Store::open(std::move(owned), {}, true, &store)));
    engine = std::make_unique<Engine>(std::move(store), workers);
  }

  Engine* operator->() { return engine.get(); }
  Store* store() { return &engine->store(); }

  Status begin(const State& state, uint32_t keep = 1) {
    return engine->begin(state.step, keep, state.sizes(), state.blob, state.host.size());
  }
  Status submit(Op op, uint64_t version, const std::vector<Span>& spans, uint64_t* batch) {
    return engine->submit(op, version, spans, batch);
  }
  Status wait(uint64_t batch, Report* report = nullptr) {
    Report unused;
    return engine->wait(batch, kDeadlineNs, report != nullptr ? report : &unused);
  }
  Status poll(uint64_t batch) {
    Report unused;
    return engine->wait(batch, 0, &unused);
  }
  // Without taking part, as wait does.
  Status until_done(uint64_t batch) {
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    Status status = poll(batch);
    while (status.code() == Code::kTimeout && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      status = poll(batch);
    }
    return status;
  }
  // Submits and waits.
  Status run(Op op, uint64_t version, const State& state, Report* report = nullptr) {
    uint64_t batch = 0;
    RETURN_IF_ERROR(submit(op, version, spans_of(state), &batch));
    return wait(batch, report);
  }
  Status commit(const State& state) {
    uint64_t batch = 0;
    RETURN_IF_ERROR(engine->queue_commit(state.host, &batch));
    return wait(batch);
  }
  Status save(const State& state, uint32_t keep = 1) {
    RETURN_IF_ERROR(begin(state, keep));
    RETURN_IF_ERROR(run(Op::kWrite, 0, state));
    return commit(state);
  }

  std::string listed() { return list_of(store()->versions()); }
  Version latest() { return store()->versions().front(); }
  // Changes one byte of an extent of the latest version, on the media.
  void flip(uint32_t extent, uint64_t at) {
    const Version version = latest();
    media->memory()[version.slot.record_offset + version.layout->extent_offsets[extent] + at] ^=
        std::byte{1};
  }

  TestMedia* media;
  std::unique_ptr<Engine> engine;
};

// Holds workers in the middle of copying.
inline bool at_copy(const MediaEvent& event) { return event.kind == EventKind::kNtCopy; }

}  // namespace lightckpt
