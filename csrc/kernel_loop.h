// The one loop that copies and sums, written once and compiled once for each instruction set.
//
// kernel_sets.h includes this inside a namespace of each set, after it has defined KERNEL_TARGET
// (the instructions that functions here may use) and the set's Vector, Sum, load, keep, store and
// stream: no template parameter can give a function its target attribute. So it has no include
// guard.
//
// Invariant: each byte of the source is loaded once, into a register, and what is stored and what
// is summed both come out of that register. Whoever edits the source meanwhile (a numpy view,
// another thread, a device) decides which bytes are copied, never that they differ from their sum.
// `keep` makes the compiler hold to that: it hides where the register's value came from.
//
// Store says where the bytes go: Streamed (around the cache, whole lines), Cached, or Nowhere.
// Hook::loaded is called after each load, before anything is done with it: tests edit the source
// there.

// Words, and single bytes at the end. For what is too little for vectors.
template <typename Store, bool kSummed, typename Hook>
KERNEL uint32_t run_words(std::byte* to, const std::byte* from, size_t bytes, uint32_t crc) {
  size_t at = 0;
  for (; at + sizeof(uint64_t) <= bytes; at += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, from + at, sizeof(word));
    keep_word(&word);
    Hook::loaded(from + at, sizeof(word));
    if constexpr (Store::kStreams) stream_word(to + at, word);
    if constexpr (Store::kCaches) std::memcpy(to + at, &word, sizeof(word));
    if constexpr (kSummed) crc = sum_word(crc, word);
  }
  for (; at < bytes; ++at) {
    uint64_t byte = std::to_integer<uint64_t>(from[at]);
    keep_word(&byte);
    Hook::loaded(from + at, 1);
    if constexpr (Store::kStores) to[at] = static_cast<std::byte>(byte);
    if constexpr (kSummed) crc = sum_byte(crc, static_cast<uint8_t>(byte));
  }
  return crc;
}

// One block of kVectors registers, each of which has a sum of its own until the end.
template <typename Store, bool kSummed, bool kFirst, typename Hook>
KERNEL void run_block(std::byte* to, const std::byte* from, Sum* sum) {
  if constexpr (Store::kStores) prefetch(from);
  UNROLLED
  for (size_t i = 0; i < kVectors; ++i) {
    const size_t at = i * sizeof(Vector);
    Vector vector = load(from + at);
    keep(&vector);
    Hook::loaded(from + at, sizeof(Vector));
    if constexpr (Store::kStreams) stream(to + at, vector);
    if constexpr (Store::kCaches) store(to + at, vector);
    if constexpr (kSummed && kFirst) sum->start(i, vector);
    if constexpr (kSummed && !kFirst) sum->go_on(i, vector);
  }
}

// Whole blocks, at least one.
template <typename Store, bool kSummed, typename Hook>
KERNEL uint32_t run_blocks(std::byte* to, const std::byte* from, size_t bytes, uint32_t crc) {
  Sum sum(crc);
  run_block<Store, kSummed, true, Hook>(to, from, &sum);
  for (size_t at = kBlockBytes; at < bytes; at += kBlockBytes) {
    run_block<Store, kSummed, false, Hook>(to + at, from + at, &sum);
  }
  return kSummed ? sum.finish() : crc;
}

// Any number of bytes, to any address: whole lines of the target as Store says, ragged ends through
// the cache. Returns the CRC-32C that continues `crc`.
template <typename Store, bool kSummed, typename Hook>
ENTRY uint32_t run(std::byte* to, const std::byte* from, size_t bytes, uint32_t crc) {
  using Ragged = std::conditional_t<Store::kStores, Cached, Nowhere>;
  if constexpr (!Store::kStores) to = const_cast<std::byte*>(from);  // for arithmetic only
  crc = ~crc;
  size_t at = 0;
  if constexpr (Store::kStreams) {
    const size_t misaligned = reinterpret_cast<uintptr_t>(to) % kLineBytes;
    at = misaligned == 0 ? 0 : std::min(bytes, kLineBytes - misaligned);
    crc = run_words<Ragged, kSummed, Hook>(to, from, at, crc);
  }
  if (const size_t blocks = (bytes - at) / kBlockBytes * kBlockBytes; blocks > 0) {
    crc = run_blocks<Store, kSummed, Hook>(to + at, from + at, blocks, crc);
    at += blocks;
  }
  const size_t lines = (bytes - at) / kLineBytes * kLineBytes;
  crc = run_words<Store, kSummed, Hook>(to + at, from + at, lines, crc);
  at += lines;
  return ~run_words<Ragged, kSummed, Hook>(to + at, from + at, bytes - at, crc);
}

// The three things that lightckpt does with bytes.
template <typename Hook>
constexpr Kernels make_kernels() {
  return {run<Streamed, false, Hook>, run<Streamed, true, Hook>, run<Nowhere, true, Hook>};
}
