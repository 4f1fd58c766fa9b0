// The sum of a set that folds: one accumulator for each register of a block. Included like
// kernel_loop.h, which see, by the sets that have `fold`, `add`, `of_crc` and `of_fold`.

KERNEL uint32_t sum_word(uint32_t crc, uint64_t word) { return crc32::sum_word(crc, word); }
KERNEL uint32_t sum_byte(uint32_t crc, uint8_t byte) { return crc32::sum_byte(crc, byte); }
KERNEL void stream_word(std::byte* to, uint64_t word) { portable::stream_word(to, word); }

struct Sum {
  Vector sums[kVectors];
  Vector begin, by_a_block;

  // The sum so far counts as if it were added to the message's first bytes.
  KERNEL explicit Sum(uint32_t crc)
      : begin(of_crc(crc)), by_a_block(of_fold(fold_by(kBlockBytes))) {}

  KERNEL void start(size_t i, Vector first) { sums[i] = i == 0 ? add(first, begin) : first; }

  KERNEL void go_on(size_t i, Vector next) { sums[i] = fold(sums[i], by_a_block, next); }

  // Folds the accumulators into the last one, whose bytes are then a message with the same sum.
  KERNEL uint32_t finish() {
    const Vector by_a_vector = of_fold(fold_by(sizeof(Vector)));
    UNROLLED
    for (size_t i = 1; i < kVectors; ++i) sums[i] = fold(sums[i - 1], by_a_vector, sums[i]);
    uint64_t words[sizeof(Vector) / sizeof(uint64_t)];
    store(reinterpret_cast<std::byte*>(words), sums[kVectors - 1]);
    uint32_t crc = 0;
    for (uint64_t word : words) crc = sum_word(crc, word);
    return crc;
  }
};
