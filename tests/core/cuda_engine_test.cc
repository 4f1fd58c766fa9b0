// The engine with a GPU. Goal: a version holds what the device had at the boundary, whichever way
// it came; no thread waits for the device but those that ask to; what is given up, refused or lost
// leaves the store as it was and the engine fit to go on. Method: tensors in the fake device's
// memory, kernels that change them before and after each guard, streams that are late at random or
// stand at a gate, and the driver's calls failing one after the other.
#include <thread>

#include "cuda_helpers.h"
#include "engine_helpers.h"

namespace lightckpt {
namespace {

constexpr Snapshot kAll[] = {Snapshot::kHost, Snapshot::kDirect, Snapshot::kDevice};
const std::vector<uint64_t> kSizes = {70'000, 0, 300, 3 * kChunkBytes + 17, 1, 64, 9 << 20, 2000};
constexpr uint64_t kRing = Gpu::kPieceBytes;  // one piece: most batches are larger

// The extents of a state as tensors on the device.
class Tensors {
 public:
  explicit Tensors(const CudaDriver& driver, std::vector<uint64_t> sizes, int ordinal = 0)
      : sizes_(std::move(sizes)) {
    EXPECT_TRUE(is_ok(CudaContext::retain(driver, ordinal, &context_)));
    for (const uint64_t bytes : sizes_) {
      CudaMemory memory;
      EXPECT_TRUE(is_ok(make_memory(*context_, bytes + 1, &memory)));
      memory_.push_back(std::move(memory));
    }
    fill(0);
  }
  ~Tensors() { fake_cuda_settle(); }  // kernels that nobody waited for

  std::vector<Span> spans() const {
    std::vector<Span> found;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      found.push_back({at(i).data(), static_cast<uint32_t>(i), 0});
    }
    return found;
  }
  std::span<std::byte> at(size_t i) const {
    return {reinterpret_cast<std::byte*>(memory_[i].get()), sizes_[i]};
  }
  void fill(int value) const {
    for (size_t i = 0; i < sizes_.size(); ++i) std::ranges::fill(at(i), std::byte(value));
  }
  void take(const State& state) const {
    for (size_t i = 0; i < sizes_.size(); ++i) std::ranges::copy(state.extents[i], at(i).begin());
  }
  bool holds(const State& state) const {
    for (size_t i = 0; i < sizes_.size(); ++i) {
      if (!std::ranges::equal(at(i), state.extents[i])) return false;
    }
    return true;
  }

 private:
  std::vector<uint64_t> sizes_;
  std::unique_ptr<CudaContext> context_;
  std::vector<CudaMemory> memory_;
};

class CudaEngine : public FakeCuda {
 protected:
  Status open(TestEngine* engine, DeviceInfo* info = nullptr, int ordinal = 0) {
    DeviceInfo unused;
    return (*engine)->open_device(*driver, ordinal, kRing, info != nullptr ? info : &unused);
  }
  static Status submit(TestEngine* engine, Op op, uint64_t version, Snapshot how, uint64_t stream,
                       const Tensors& tensors, uint64_t* batch, int ordinal = 0) {
    return (*engine)->submit_on({ordinal, stream, how}, op, version, tensors.spans(), batch);
  }
  static Status write(TestEngine* engine, Snapshot how, uint64_t stream, const Tensors& tensors,
                      uint64_t* batch) {
    return submit(engine, Op::kWrite, 0, how, stream, tensors, batch);
  }
};

TEST_F(CudaEngine, a_version_is_what_the_device_had_at_the_boundary) {
  for (const Snapshot how : kAll) {
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      start({.seed = seed});
      const uint64_t torch = torch_stream();
      TestEngine engine(1 + seed % 3, Granularity::kCacheLine, 64 << 20);
      ASSERT_TRUE(is_ok(open(&engine)));
      const Tensors tensors(*driver, kSizes);
      for (uint64_t step = 1; step <= 3; ++step) {
        const State state = State::of(step, kSizes);
        launch(torch, [&] { tensors.take(state); });
        uint64_t batch = 0;
        uint64_t commit = 0;
        ASSERT_TRUE(is_ok(engine.begin(state)));
        ASSERT_TRUE(is_ok(write(&engine, how, torch, tensors, &batch)));
        ASSERT_TRUE(is_ok(engine->stream_wait(batch, torch, kDeadlineNs)));
        launch(torch, [&] { tensors.fill(0xff); });
        ASSERT_TRUE(is_ok(engine->commit(state.host, &commit)));
        ASSERT_TRUE(is_ok(engine.wait(commit)));
        EXPECT_TRUE(holds(engine.store(), engine.latest(), state)) << "seed " << seed;
        for (const Op op : {Op::kRead, Op::kCopy}) {
          launch(torch, [&] { tensors.fill(0xee); });
          const uint64_t version = engine.latest().slot.version;
          ASSERT_TRUE(is_ok(submit(&engine, op, version, how, torch, tensors, &batch)));
          ASSERT_TRUE(is_ok(engine.wait(batch)));
          EXPECT_TRUE(tensors.holds(state)) << "seed " << seed;
        }
      }
    }
  }
}

// No thread has waited for the device when all is queued; the version is durable when it has come.
TEST_F(CudaEngine, a_commit_waits_for_what_is_on_its_way) {
  for (const Snapshot how : {Snapshot::kDirect, Snapshot::kDevice}) {
    start({});
    const uint64_t torch = torch_stream();
    TestEngine engine(2, Granularity::kCacheLine, 64 << 20);
    ASSERT_TRUE(is_ok(open(&engine)));
    const Tensors tensors(*driver, kSizes);
    const State state = State::of(1, kSizes);
    const uint64_t gate = fake_cuda_gate(torch);
    launch(torch, [&] { tensors.take(state); });
    uint64_t batch = 0;
    uint64_t check = 0;
    uint64_t commit = 0;
    ASSERT_TRUE(is_ok(engine.begin(state)));
    EXPECT_TRUE(fails(engine->commit(state.host, &commit), Code::kInvalid, "0 of"));
    ASSERT_TRUE(is_ok(write(&engine, how, torch, tensors, &batch)));
    ASSERT_TRUE(is_ok(engine->stream_wait(batch, torch, 0)));
    ASSERT_TRUE(is_ok(engine->submit_on({0, torch}, Op::kCheck, 0,
                                        std::vector<Span>{tensors.spans()[2]}, &check)));
    ASSERT_TRUE(is_ok(engine->stream_wait(check, torch, 0)));
    launch(torch, [&] { tensors.fill(0xff); });
    ASSERT_TRUE(is_ok(engine->commit(state.host, &commit)));
    EXPECT_TRUE(fails(engine.poll(commit), Code::kTimeout));
    EXPECT_TRUE(fails(engine->commit(state.host, &commit), Code::kInvalid, "queued already"));
    EXPECT_EQ(engine.listed(), "");
    fake_cuda_open(gate);
    ASSERT_TRUE(is_ok(engine.wait(commit)));
    EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
    EXPECT_TRUE(is_ok(engine.wait(check)));
  }
}

TEST_F(CudaEngine, a_check_that_finds_other_bytes_keeps_the_version_from_being_one) {
  for (const Snapshot how : kAll) {
    start({});
    const uint64_t torch = torch_stream();
    TestEngine engine(2, Granularity::kVolatile, 64 << 20);
    ASSERT_TRUE(is_ok(open(&engine)));
    const Tensors tensors(*driver, kSizes);
    for (const bool edited : {true, false}) {
      const State state = State::of(1, kSizes);
      launch(torch, [&] { tensors.take(state); });
      uint64_t batch = 0;
      uint64_t check = 0;
      uint64_t commit = 0;
      ASSERT_TRUE(is_ok(engine.begin(state)));
      ASSERT_TRUE(is_ok(write(&engine, how, torch, tensors, &batch)));
      if (edited) {
        ASSERT_TRUE(is_ok(engine.wait(batch)));
        launch(torch, [&] { tensors.at(3)[kChunkBytes] ^= std::byte{1}; });
      }
      ASSERT_TRUE(is_ok(submit(&engine, Op::kCheck, 0, how, torch, tensors, &check)));
      ASSERT_TRUE(is_ok(engine->stream_wait(check, torch, kDeadlineNs)));
      launch(torch, [&] { tensors.fill(0xff); });
      ASSERT_TRUE(is_ok(engine->commit(state.host, &commit)));
      Report report;
      if (edited) {
        EXPECT_TRUE(fails(engine.wait(commit), Code::kChanged, "dropped"));
        EXPECT_TRUE(fails(engine.wait(check, &report), Code::kChanged));
        EXPECT_EQ(report.bad_count, 1u);
        EXPECT_EQ(report.bad[0], 3u);
        EXPECT_EQ(engine.listed(), "");
      } else {
        EXPECT_TRUE(is_ok(engine.wait(commit)));
        EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
      }
    }
  }
}

// The test of the tests: a driver whose streams do not wait for events lets a version have what was
// there before the boundary's last kernel.
TEST_F(CudaEngine, a_wait_left_out_is_found) {
  for (const Snapshot how : kAll) {
    start({.ignore_waits = 1});
    const uint64_t torch = torch_stream();
    TestEngine engine(2, Granularity::kVolatile, 64 << 20);
    ASSERT_TRUE(is_ok(open(&engine)));
    const Tensors tensors(*driver, kSizes);
    const State before = State::of(1, kSizes);
    tensors.take(before);
    const uint64_t gate = fake_cuda_gate(torch);
    launch(torch, [&] { tensors.fill(0xff); });
    uint64_t batch = 0;
    ASSERT_TRUE(is_ok(engine.begin(before)));
    ASSERT_TRUE(is_ok(write(&engine, how, torch, tensors, &batch)));
    ASSERT_TRUE(is_ok(engine.wait(batch)));
    ASSERT_TRUE(is_ok(engine.commit(before)));
    EXPECT_TRUE(holds(engine.store(), engine.latest(), before));
    fake_cuda_open(gate);
  }
}

TEST_F(CudaEngine, what_is_given_up_leaves_nothing_under_way) {
  for (const Snapshot how : kAll) {
    start({});
    const uint64_t torch = torch_stream();
    TestEngine engine(2, Granularity::kVolatile, 64 << 20);
    ASSERT_TRUE(is_ok(open(&engine)));
    const Tensors tensors(*driver, kSizes);
    const State state = State::of(1, kSizes);
    const uint64_t gate = fake_cuda_gate(torch);
    uint64_t batch = 0;
    ASSERT_TRUE(is_ok(engine.begin(state)));
    ASSERT_TRUE(is_ok(write(&engine, how, torch, tensors, &batch)));
    EXPECT_TRUE(fails(engine->drop(0), Code::kTimeout)) << "the device has some of it";
    EXPECT_TRUE(fails(engine.begin(state), Code::kInvalid, "in flight"));
    fake_cuda_open(gate);
    EXPECT_FALSE(engine.wait(batch).ok());
    launch(torch, [&] { tensors.take(state); });
    uint64_t commit = 0;
    ASSERT_TRUE(is_ok(engine.begin(state)));
    ASSERT_TRUE(is_ok(write(&engine, how, torch, tensors, &batch)));
    ASSERT_TRUE(is_ok(engine->stream_wait(batch, torch, kDeadlineNs)));
    ASSERT_TRUE(is_ok(engine->commit(state.host, &commit)));
    ASSERT_TRUE(is_ok(engine.wait(commit)));
    EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
  }
}

// The device writes into the mapping until it is through: an end that did not wait is a misuse.
TEST_F(CudaEngine, the_end_waits_for_what_is_under_way) {
  for (const Snapshot how : kAll) {
    start({});
    const uint64_t torch = torch_stream();
    auto engine = std::make_unique<TestEngine>(2, Granularity::kVolatile, 64 << 20);
    ASSERT_TRUE(is_ok(open(engine.get())));
    const Tensors tensors(*driver, kSizes);
    const uint64_t gate = fake_cuda_gate(torch);
    uint64_t batch = 0;
    ASSERT_TRUE(is_ok(engine->begin(State::of(1, kSizes))));
    ASSERT_TRUE(is_ok(write(engine.get(), how, torch, tensors, &batch)));
    std::thread end([&] { engine.reset(); });
    fake_cuda_settle();
    fake_cuda_open(gate);
    end.join();
  }
}

TEST_F(CudaEngine, a_store_that_cuda_refuses_is_reached_through_the_ring) {
  start({.refuse_registration = 801});  // CUDA_ERROR_NOT_SUPPORTED
  const uint64_t torch = torch_stream();
  TestEngine engine(2, Granularity::kVolatile, 64 << 20);
  DeviceInfo info;
  ASSERT_TRUE(is_ok(open(&engine, &info)));
  EXPECT_TRUE(fails(info.direct, Code::kIo, "cuMemHostRegister"));
  EXPECT_EQ(info.ring_bytes, kRing);
  EXPECT_NE(info.name, "");
  const Tensors tensors(*driver, kSizes);
  const State state = State::of(1, kSizes);
  tensors.take(state);
  uint64_t batch = 0;
  ASSERT_TRUE(is_ok(engine.begin(state)));
  EXPECT_TRUE(fails(write(&engine, Snapshot::kDirect, torch, tensors, &batch), Code::kIo,
                    "cuMemHostRegister"));
  for (const Snapshot how : {Snapshot::kDevice, Snapshot::kHost}) {
    ASSERT_TRUE(is_ok(write(&engine, how, torch, tensors, &batch)));
    ASSERT_TRUE(is_ok(engine.wait(batch)));
  }
  ASSERT_TRUE(is_ok(engine.commit(state)));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
}

TEST_F(CudaEngine, a_store_that_grows_is_registered_anew) {
  const uint64_t torch = torch_stream();
  TestEngine engine(2, Granularity::kVolatile, 64 << 20);
  ASSERT_TRUE(is_ok(open(&engine)));
  for (uint64_t step = 1; step <= 3; ++step) {
    const std::vector<uint64_t> sizes = {step * (2 << 20), 100};
    const Tensors tensors(*driver, sizes);
    const State state = State::of(step, sizes);
    tensors.take(state);
    const uint64_t before = engine.media->size();
    uint64_t batch = 0;
    ASSERT_TRUE(is_ok(engine.begin(state)));
    EXPECT_GT(engine.media->size(), before);
    ASSERT_TRUE(is_ok(write(&engine, Snapshot::kDirect, torch, tensors, &batch)));
    ASSERT_TRUE(is_ok(engine.wait(batch)));
    ASSERT_TRUE(is_ok(engine.commit(state)));
    EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
  }
  EXPECT_EQ(counted().registrations, 1);
}

TEST_F(CudaEngine, what_makes_no_sense_is_refused) {
  const uint64_t torch = torch_stream();
  TestEngine engine(1, Granularity::kVolatile, 64 << 20);
  const Tensors tensors(*driver, kSizes);
  uint64_t batch = 0;
  EXPECT_TRUE(fails(open(&engine, nullptr, 7), Code::kNotFound));
  ASSERT_TRUE(is_ok(engine.begin(State::of(1, kSizes))));
  EXPECT_TRUE(fails(write(&engine, Snapshot::kHost, torch, tensors, &batch), Code::kInvalid,
                    "device 0 has not been opened"));
  ASSERT_TRUE(is_ok(open(&engine)));
  EXPECT_TRUE(fails(submit(&engine, Op::kVerify, 0, Snapshot::kHost, torch, tensors, &batch),
                    Code::kInvalid, "to verify"));
  EXPECT_TRUE(fails(engine->stream_wait(77, torch, 0), Code::kNotFound, "never submitted"));
  fake_cuda_capture(torch, 1);
  EXPECT_TRUE(fails(write(&engine, Snapshot::kHost, torch, tensors, &batch), Code::kBusy, "graph"));
  fake_cuda_capture(torch, 0);
  EXPECT_TRUE(is_ok(write(&engine, Snapshot::kHost, torch, tensors, &batch)));
  EXPECT_TRUE(is_ok(engine.wait(batch)));
  EXPECT_TRUE(is_ok(engine->stream_wait(batch, torch, 0))) << "of a batch that is done";
}

// Whichever call it is: the version is refused or whole, and the next one is made.
TEST_F(CudaEngine, a_call_that_fails_costs_one_version_at_most) {
  for (const Snapshot how : kAll) {
    uint64_t calls = 0;
    for (uint64_t nth = 1; calls == 0; ++nth) {
      start({.seed = nth, .delay_us_max = 0});
      const uint64_t torch = torch_stream();
      TestEngine engine(2, Granularity::kCacheLine, 16 << 20);
      ASSERT_TRUE(is_ok(open(&engine)));
      const std::vector<uint64_t> sizes = {5 << 20, 100, 100};
      const Tensors tensors(*driver, sizes);
      const auto save = [&](uint64_t step) -> Status {
        const State state = State::of(step, sizes);
        tensors.take(state);
        uint64_t batch = 0;
        uint64_t commit = 0;
        RETURN_IF_ERROR(engine.begin(state));
        Status status = write(&engine, how, torch, tensors, &batch);
        if (status.ok()) status = engine->stream_wait(batch, torch, kDeadlineNs);
        if (status.ok()) status = engine.wait(batch);
        if (status.ok()) status = engine->commit(state.host, &commit);
        if (status.ok()) status = engine.wait(commit);
        fake_cuda_settle();
        if (!status.ok()) (void)engine->drop(kDeadlineNs);
        if (status.ok()) {
          EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
        }
        return status;
      };
      ASSERT_TRUE(is_ok(save(1)));
      fake_cuda_fail(nullptr, nth, kOutOfMemory);
      const Status status = save(2);
      if (fake_cuda_unfail() != 0) calls = nth;
      if (!status.ok()) {
        EXPECT_TRUE(fails(status, Code::kNoSpace, "OUT_OF_MEMORY")) << nth;
      }
      EXPECT_TRUE(is_ok(save(3))) << "call " << nth;
      if (HasFailure()) return;
    }
    EXPECT_GT(calls, 15u);
  }
}

TEST_F(CudaEngine, two_devices_share_a_version) {
  start({.devices = 2});
  const uint64_t streams[] = {torch_stream(0), torch_stream(1)};
  TestEngine engine(2, Granularity::kVolatile, 64 << 20);
  const std::vector<uint64_t> sizes = {3 << 20, 5 << 20, 100'000};
  State state = State::of(1, sizes);
  const Tensors first(*driver, sizes, 0);
  const Tensors second(*driver, sizes, 1);
  first.take(state);
  second.take(state);
  uint64_t commit = 0;
  ASSERT_TRUE(is_ok(engine.begin(state)));
  std::vector<uint64_t> batches(3);
  for (int device = 0; device < 2; ++device) {
    ASSERT_TRUE(is_ok(open(&engine, nullptr, device)));
    const Span span = (device == 0 ? first : second).spans()[static_cast<size_t>(device)];
    ASSERT_TRUE(is_ok(engine->submit_on({device, streams[device], Snapshot::kDirect}, Op::kWrite, 0,
                                        std::vector<Span>{span}, &batches[device])));
  }
  const Span host = {state.extents[2].data(), 2, 0};
  ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, {host}, &batches[2])));
  ASSERT_TRUE(is_ok(engine.wait(batches[2])));
  ASSERT_TRUE(is_ok(engine->commit(state.host, &commit)));
  ASSERT_TRUE(is_ok(engine.wait(commit)));
  EXPECT_TRUE(holds(engine.store(), engine.latest(), state));
}

// What the device wrote is flushed and fenced before the slot that makes it a version.
TEST_F(CudaEngine, the_media_hears_of_what_the_device_wrote) {
  const uint64_t torch = torch_stream();
  TestEngine engine(1, Granularity::kCacheLine, 64 << 20);
  ASSERT_TRUE(is_ok(open(&engine)));
  const std::vector<uint64_t> sizes = {2 * kChunkBytes + 5, 300};
  const Tensors tensors(*driver, sizes);
  const State state = State::of(1, sizes);
  tensors.take(state);
  EventLog log;
  uint64_t batch = 0;
  ASSERT_TRUE(is_ok(engine.begin(state)));
  engine.media->set_trace(&log);
  ASSERT_TRUE(is_ok(write(&engine, Snapshot::kDirect, torch, tensors, &batch)));
  ASSERT_TRUE(is_ok(engine.wait(batch)));
  engine.media->set_trace(nullptr);
  uint64_t told = 0;
  bool fenced = false;
  for (const auto& event : log.take()) {
    if (event.kind == EventKind::kDmaDone) told += event.bytes;
    fenced = event.kind == EventKind::kFence;
  }
  EXPECT_EQ(told, 2 * kChunkBytes + 305);
  EXPECT_TRUE(fenced) << "the last event is no fence";
  ASSERT_TRUE(is_ok(engine.commit(state)));
}

}  // namespace
}  // namespace lightckpt
