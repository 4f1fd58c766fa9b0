// A reader with a GPU. Goal: what may only be read is registered so, where the GPU can do that, and
// goes through the ring else; what the store has grown by since, too. Method: a store of a file,
// whose reader's mapping cannot be written to, and the fake driver.
#include "cuda_engine_helpers.h"

namespace lightckpt {
namespace {

class CudaReader : public CudaEngine {
 protected:
  // A writer with one version.
  void SetUp() override {
    CudaEngine::SetUp();
    torch_ = torch_stream();
    StoreOptions options;
    options.create = true;
    options.media = MediaKind::kEmulated;
    ASSERT_TRUE(is_ok(Store::open(path_, options, &writer_)));
    ASSERT_TRUE(is_ok(save(writer_.get(), State::of(1, kSizes), 1)));
  }
  void TearDown() override {
    reader_.reset();
    CudaEngine::TearDown();
  }
  void open_reader(DeviceInfo* info) {
    StoreOptions options;
    options.read_only = true;
    options.media = MediaKind::kEmulated;
    std::unique_ptr<Store> store;
    ASSERT_TRUE(is_ok(Store::open(path_, options, &store)));
    reader_ = std::make_unique<Engine>(std::move(store), 2);
    ASSERT_TRUE(is_ok(reader_->open_device(*driver, 0, {kRing, kDeadlineNs}, info)));
  }
  // Reads the newest version into tensors, and looks whether it is that state.
  void read(Snapshot how, const State& state, Report* report) {
    const Tensors tensors(*driver, state.sizes());
    const uint64_t version = reader_->store().versions().front().slot.version;
    uint64_t batch = 0;
    ASSERT_TRUE(
        is_ok(reader_->submit_on({0, torch_, how}, Op::kRead, version, tensors.spans(), &batch)));
    ASSERT_TRUE(is_ok(reader_->wait(batch, kDeadlineNs, report)));
    EXPECT_TRUE(tensors.holds(state));
  }

  TempFolder folder_;
  const std::string path_ = folder_.file("store");
  std::unique_ptr<Store> writer_;
  std::unique_ptr<Engine> reader_;
  uint64_t torch_ = 0;
};

TEST_F(CudaReader, registers_what_may_be_read_only) {
  DeviceInfo info;
  Report report;
  open_reader(&info);
  EXPECT_TRUE(is_ok(info.direct));
  read(Snapshot::kDirect, State::of(1, kSizes), &report);
  EXPECT_TRUE(report.in_place);
}

TEST_F(CudaReader, takes_the_ring_where_a_gpu_cannot_register_that) {
  fake_cuda_attribute(0, 113, 0);
  DeviceInfo info;
  Report report;
  open_reader(&info);
  EXPECT_TRUE(fails(info.direct, Code::kIo, "open for reading only"));
  EXPECT_EQ(fake_cuda_calls("cuMemHostRegister"), 0u);
  read(Snapshot::kHost, State::of(1, kSizes), &report);
  EXPECT_FALSE(report.in_place);
}

TEST_F(CudaReader, takes_the_ring_for_what_has_grown_since) {
  DeviceInfo info;
  Report report;
  open_reader(&info);
  const State larger = State::of(2, {30 << 20, 1000});
  const uint64_t before = reader_->store().media().size();
  ASSERT_TRUE(is_ok(save(writer_.get(), larger, 1)));
  read(Snapshot::kDirect, larger, &report);
  EXPECT_GT(reader_->store().media().size(), before);
  EXPECT_FALSE(report.in_place);
}

}  // namespace
}  // namespace lightckpt
