// EmulatedMedia. Goal: it is never quicker than it was told to be, stands still while its gate is
// closed and no longer, and refuses settings that make no sense; who waits for it with a deadline
// gets away. Method: the variables of the environment, a gate that the test holds by flock, and
// threads that say that they have come to a copy before it waits.
#include "emulated_media.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include <atomic>
#include <cstdlib>
#include <fstream>

#include "engine_helpers.h"

namespace lightckpt {
namespace {

constexpr uint64_t kBytes = 256 * 1024;
constexpr int kLooks = 50;  // at what must not come: one that comes is seen by some of them
constexpr char kRate[] = "LIGHTCKPT_EMULATED_WRITE_RATE";
constexpr char kGate[] = "LIGHTCKPT_EMULATED_GATE";

// A variable of the environment, for as long as it lives.
class Setting {
 public:
  Setting(const char* name, const std::string& value) : name_(name) {
    CHECK(setenv(name, value.c_str(), 1) == 0);
  }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;
  ~Setting() { unsetenv(name_); }

 private:
  const char* name_;
};

// A gate on a file, closed at first, and opened at the latest when it goes.
class FileGate {
 public:
  explicit FileGate(const std::string& path) {
    fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    CHECK(fd_ >= 0 && flock(fd_, LOCK_EX) == 0);
  }
  FileGate(const FileGate&) = delete;
  FileGate& operator=(const FileGate&) = delete;
  ~FileGate() { ::close(fd_); }
  void open() { CHECK(flock(fd_, LOCK_UN) == 0); }

 private:
  int fd_;
};

// Says that a thread has come to a copy, or to what follows a device's: the gate is behind that.
struct Arrival final : MediaTrace {
  void on_event(const MediaEvent& event) override {
    if (at_copy(event) || event.kind == EventKind::kDmaDone) here.set();
  }
  Signal here;
};

struct Emulated : testing::Test {
  std::unique_ptr<Media> created() {
    std::unique_ptr<Media> media;
    EXPECT_TRUE(is_ok(FileMedia::create(path, MediaKind::kEmulated, kBytes, &media)));
    return media;
  }
  Status refused() {
    std::unique_ptr<Media> media;
    Status status = FileMedia::create(path, MediaKind::kEmulated, kBytes, &media);
    EXPECT_FALSE(std::filesystem::exists(path));
    return status;
  }

  // Read from the file: a thread may be about to write to the mapping.
  std::string in_file() {
    std::string bytes(100, '?');
    std::ifstream(path, std::ios::binary).read(bytes.data(), 100);
    return bytes;
  }

  TempFolder folder{memory_folder()};
  std::string path = folder.file("media"), gate_path = folder.file("gate");
};

// The one lower bound on a time: what is emulated is never quicker than it was told to be.
TEST_F(Emulated, it_takes_no_more_than_its_rate) {
  const Setting rate(kRate, "1000000");
  const auto media = created();
  ASSERT_NE(media, nullptr);
  const Buffer data = random_bytes(kBytes / 4, 1);
  const auto begin = std::chrono::steady_clock::now();
  media->nt_copy(0, data);
  (void)media->nt_copy_crc(0, data);
  media->dma_done(0, data.size());
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  EXPECT_GT(took.count(), 3 * static_cast<double>(data.size()) / 1e6 - 1e-4);
  EXPECT_TRUE(std::ranges::equal(data, Bytes(media->view(), data.size())));
}

TEST_F(Emulated, a_rate_that_is_no_number_is_refused) {
  for (const char* words : {"2 GB/s", "0", "", "-1", "99999999999999999999"}) {
    const Setting rate(kRate, words);
    EXPECT_TRUE(fails(refused(), Code::kInvalid, "not a number of bytes per second")) << words;
  }
}

TEST_F(Emulated, a_gate_that_is_not_there_is_refused) {
  const Setting gate(kGate, gate_path);
  const Status status = refused();
  EXPECT_TRUE(fails(status, Code::kInvalid, std::string(kGate) + " is '" + gate_path));
  EXPECT_TRUE(fails(status, Code::kInvalid, "No such file"));
}

TEST_F(Emulated, whoever_writes_stands_still_while_the_gate_is_closed) {
  using Access = void (*)(Media*, Bytes);
  const Access accesses[] = {[](Media* media, Bytes data) { media->nt_copy(0, data); },
                             [](Media* media, Bytes data) { (void)media->nt_copy_crc(0, data); },
                             [](Media* media, Bytes data) { media->dma_done(0, data.size()); }};
  FileGate gate(gate_path);
  const Setting setting(kGate, gate_path);
  const auto media = created();
  ASSERT_NE(media, nullptr);
  EXPECT_TRUE(media->may_stall());
  gate.open();
  uint8_t round = 0;
  for (const Access access : accesses) {
    const std::string before = in_file();
    const Buffer data(100, std::byte{++round});
    Arrival arrival;
    media->set_trace(&arrival);
    std::atomic<bool> done = false;
    FileGate closed(gate_path);
    std::thread writer([&] {
      access(media.get(), data);
      done = true;
    });
    EXPECT_TRUE(arrival.here.wait());
    for (int i = 0; i < kLooks; ++i) {
      std::this_thread::yield();
      EXPECT_FALSE(done);
    }
    EXPECT_EQ(in_file(), before);
    closed.open();
    writer.join();
    media->set_trace(nullptr);
  }
  EXPECT_EQ(media->view()[0], std::byte{2}) << "the second access is the last that writes";
}

TEST_F(Emulated, a_signal_opens_no_gate) {
  FileGate gate(gate_path);
  const Setting setting(kGate, gate_path);
  const auto media = created();
  ASSERT_NE(media, nullptr);
  struct sigaction action = {}, before = {};
  action.sa_handler = [](int) {};  // without SA_RESTART
  ASSERT_EQ(sigaction(SIGUSR1, &action, &before), 0);
  Arrival arrival;
  media->set_trace(&arrival);
  std::atomic<bool> done = false;
  std::thread writer([&] {
    media->nt_copy(0, Buffer(100));
    done = true;
  });
  EXPECT_TRUE(arrival.here.wait());
  for (int i = 0; i < kLooks; ++i) {
    pthread_kill(writer.native_handle(), SIGUSR1);
    std::this_thread::yield();
    EXPECT_FALSE(done);
  }
  gate.open();
  writer.join();
  sigaction(SIGUSR1, &before, nullptr);
  media->set_trace(nullptr);
}

// Who waits for a copy does its share of it where that is quick: here it would never come back.
TEST_F(Emulated, who_waits_for_a_copy_at_the_gate_waits_no_longer_than_he_said) {
  FileGate gate(gate_path);
  const Setting setting(kGate, gate_path);
  StoreOptions options;
  options.create = true;
  options.media = MediaKind::kEmulated;
  std::unique_ptr<Store> store;
  gate.open();
  ASSERT_TRUE(is_ok(Store::open(path, options, &store)));
  Engine engine(std::move(store), 1);
  const State state = State::of(1, {5000, 300});
  uint64_t batch = 0;
  Report report;
  ASSERT_TRUE(is_ok(engine.begin(1, 1, state.sizes(), state.blob, state.host.size())));
  FileGate closed(gate_path);
  ASSERT_TRUE(is_ok(engine.submit(Op::kWrite, 0, spans_of(state), &batch)));
  for (int64_t timeout_ns : {int64_t{0}, int64_t{1000}, int64_t{2'000'000}}) {
    EXPECT_TRUE(fails(engine.wait(batch, timeout_ns, &report), Code::kTimeout, "0 bytes were"));
  }
  closed.open();
  EXPECT_TRUE(is_ok(engine.wait(batch, kDeadlineNs, &report)));
  EXPECT_TRUE(is_ok(engine.queue_commit(state.host, &batch)));
  EXPECT_TRUE(is_ok(engine.wait(batch, kDeadlineNs, &report)));
  EXPECT_TRUE(holds(&engine.store(), engine.store().versions().front(), state));
}

TEST_F(Emulated, without_settings_it_is_as_quick_as_its_file) {
  const auto media = created();
  ASSERT_NE(media, nullptr);
  EXPECT_FALSE(media->may_stall());
  EXPECT_EQ(media->granularity(), Granularity::kCacheLine);
}

}  // namespace
}  // namespace lightckpt
