// How a row of codes is laid out for the integer tiles.
//
// int8: the channels, padded to whole tile rows of 64. int4: a byte holds one channel of each half, so the
// low halves come first and the high halves after them, each padded to 32. A tile of 64 channels then lies in
// one half, except that for an odd number of 32s the middle one is mixed: 32 channels of either half.
namespace coattn::amx {
namespace {

template <Elem E>
struct IntShape {
  static constexpr bool kFour = E == Elem::int4;
  static constexpr int kHalves = kFour ? 2 : 1;

  explicit IntShape(int head_size)
      : part(head_size / kHalves),
        room(kFour ? (part + 31) / 32 * 32 : (part + 63) / 64 * 64),
        row(kHalves * room),
        chunks(row / 64) {}

  bool mixed(int chunk) const { return kFour && room % 64 && chunk == room / 64; }
  // The half that 16 channels (quarter q of a chunk) belong to.
  int half(int chunk, int q) const { return !kFour ? 0 : mixed(chunk) ? q / 2 : chunk * 64 / room; }

  // Where the sum of the o-th channel of a chunk lies in it: the order of pack_values.
  int place(int chunk, int o) const {
    const int j = o % 16 / 4;
    if (!mixed(chunk)) return j * 16 + o / 16 * 4 + o % 4;
    return (o / 32 * 2 + j / 2) * 16 + j % 2 * 8 + o % 32 / 16 * 4 + o % 4;
  }

  int part;    // channels of a half (int8: of the row)
  int room;    // the same, padded
  int row;     // bytes of a row of codes, one per channel
  int chunks;  // tiles of 64 channels
};

}  // namespace
}  // namespace coattn::amx
