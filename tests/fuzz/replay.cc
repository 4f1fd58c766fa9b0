// fuzz_replay: the fuzzer where there is no libFuzzer. Replays inputs, then mutates them for a
// time.
//
//   fuzz_replay [--seconds=N] [--seed=N] [--keep=FILE] [--write-seeds=FOLDER] [FILE or FOLDER]...
//
// Without files it starts from the seeds, which --write-seeds saves. The same seed draws the same
// inputs, as far as the time goes. Before an input runs it is written to --keep, if that is
// given, so that the one that stops the process is there afterwards.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "open_store.h"
#include "seeds.h"

namespace lightckpt::fuzz {
namespace {

constexpr unsigned kInputSeconds = 20;  // an input that takes longer hangs

Buffer read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  CHECK(file.good());
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const Bytes bytes = std::as_bytes(std::span(text));
  return Buffer(bytes.begin(), bytes.end());
}

void write_file(const std::filesystem::path& path, Bytes bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  CHECK(file.good());
}

std::vector<std::filesystem::path> files_below(const std::filesystem::path& path) {
  if (!std::filesystem::is_directory(path)) return {path};
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::ranges::sort(files);
  return files;
}

struct Options {
  uint64_t seconds = 0;
  uint64_t seed = 1;
  std::filesystem::path keep;
  std::vector<std::filesystem::path> inputs;
};

void run_guarded(Bytes input, const Options& options) {
  if (!options.keep.empty()) write_file(options.keep, input);
  alarm(kInputSeconds);
  run_input(input);
  alarm(0);
}

// Pools mutants too: a chain of changes reaches what one cannot. Without coverage to say which are
// worth it, they take turns.
uint64_t mutate_for(std::vector<Buffer> pool, const Options& options) {
  constexpr size_t kPoolMax = 2000;
  const size_t first = pool.size();
  Random random(options.seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(options.seconds);
  uint64_t count = 0;
  for (; std::chrono::steady_clock::now() < end; ++count) {
    Input input = decode_input(pool[random() % pool.size()]);
    mutate(&input, &random);
    Buffer bytes = encode_input(input);
    run_guarded(bytes, options);
    if (random() % 4 != 0) continue;
    if (pool.size() < first + kPoolMax) {
      pool.push_back(std::move(bytes));
    } else {
      pool[first + random() % kPoolMax] = std::move(bytes);
    }
  }
  return count;
}

int run(const Options& options) {
  std::vector<Buffer> pool;
  for (const auto& path : options.inputs) {
    for (const auto& file : files_below(path)) pool.push_back(read_file(file));
  }
  if (pool.empty()) {
    for (const auto& [name, input] : seeds()) pool.push_back(encode_input(input));
  }
  for (const Buffer& input : pool) run_guarded(input, options);
  const uint64_t mutants = mutate_for(pool, options);
  std::printf("open_store: %zu inputs replayed, %llu mutants with seed %llu, failures: 0\n",
              pool.size(), static_cast<unsigned long long>(mutants),
              static_cast<unsigned long long>(options.seed));
  return 0;
}

int main_of(const std::vector<std::string>& arguments) {
  Options options;
  for (const std::string& argument : arguments) {
    const auto value = [&](const std::string& name) -> const char* {
      return argument.starts_with(name) ? argument.c_str() + name.size() : nullptr;
    };
    if (const char* seconds = value("--seconds=")) {
      options.seconds = std::strtoull(seconds, nullptr, 10);
    } else if (const char* seed = value("--seed=")) {
      options.seed = std::strtoull(seed, nullptr, 10);
    } else if (const char* keep = value("--keep=")) {
      options.keep = keep;
    } else if (const char* folder = value("--write-seeds=")) {
      for (const auto& [name, input] : seeds()) {
        write_file(std::filesystem::path(folder) / (name + ".bin"), encode_input(input));
      }
      return 0;
    } else {
      options.inputs.emplace_back(argument);
    }
  }
  return run(options);
}

}  // namespace
}  // namespace lightckpt::fuzz

int main(int argc, char** argv) { return lightckpt::fuzz::main_of({argv + 1, argv + argc}); }
