// An accelerator without hardware: two devices whose memory is the host's and whose kernels are the
// CPU's, behind everything of torch that makes an accelerator differ from the CPU.
//
// Problem: what goes wrong on a GPU and not on the CPU is threads (autograd runs a thread a device),
// streams, events, memory that an allocator hands on before a kernel is done with it, a device's own
// generators and statistics. Invariant: a kernel runs at once and gives the CPU's bits; the order in
// which a real device might run it is followed by a clock a stream, and every access to a block that
// nothing orders after a conflicting one on another stream is written down as a race, also where the
// block was freed and handed on in between. Rejected: fakes of `torch.cuda`, which the C++ of torch
// and of the compiled recorder do not ask; kernels that really run later, whose races show by chance.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cstdlib>
#include <map>
#include <optional>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

constexpr c10::DeviceType KIND = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
constexpr size_t ROUND = 512;  // bytes, as CUDA's caching allocator rounds

std::recursive_mutex lock;
using Locked = std::lock_guard<std::recursive_mutex>;

// ------------------------------------------------------------------------------ streams and clocks

// (device, stream): how many of its kernels have been ordered before.
using Lane = std::pair<int, int64_t>;
using Clock = std::map<Lane, int64_t>;

void merge(Clock& into, const Clock& other) {
  for (const auto& [lane, tick] : other) into[lane] = std::max(into[lane], tick);
}

bool before(const Clock& clock, const Lane& lane, int64_t tick) {
  auto found = clock.find(lane);
  return found != clock.end() && found->second >= tick;
}

std::map<Lane, Clock> clocks;
Clock host;  // what the host has waited for: all that it launches from then on comes after
int64_t streams_made = 0, kernels = 0, host_waits = 0, stream_waits = 0;
thread_local int device_now = 0;
thread_local int64_t stream_now[DEVICES] = {};

Lane lane_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
c10::Device device_at(int index) { return c10::Device(KIND, static_cast<c10::DeviceIndex>(index)); }
int index_of(c10::Device device) { return device.has_index() ? device.index() : device_now; }

struct Event {
  Clock clock;
};

// ------------------------------------------------------------------------------------------ memory

struct Block {
  void* data;
  size_t size;  // rounded
  Lane home;    // whose free blocks it belongs to
  bool used = false;
  bool reserved = true;     // the driver counts it; not once the allocator would have returned it
  std::set<Lane> recorded;  // `record_stream`
  std::pair<Lane, int64_t> written{{-1, 0}, 0};
  std::map<Lane, int64_t> read;
  std::string writer;
};

std::unordered_map<void*, Block*> blocks;
std::map<std::pair<Lane, size_t>, std::vector<Block*>> pool;
std::map<int, c10::CachingDeviceAllocator::DeviceStats> statistics;
std::vector<std::string> races;
int64_t capacity[DEVICES] = {INT64_MAX, INT64_MAX};  // bytes allocated at most, else out of memory
std::optional<std::vector<std::pair<int64_t, int64_t>>> allocations;  // (address, bytes), less than 0 when released
std::map<std::string, int64_t> failing;  // kernels for which there will be no memory, and how often

c10::CachingAllocator::Stat& total(c10::CachingAllocator::StatArray& stats) {
  return stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
}

void release(void* data) {
  if (!data) return;
  Locked held(lock);
  Block* block = blocks.at(data);
  block->used = false;
  total(statistics[block->home.first].allocated_bytes).decrease(block->size);
  if (allocations) allocations->emplace_back(reinterpret_cast<int64_t>(data), -static_cast<int64_t>(block->size));
  // The allocator waits for the streams that were recorded before it hands the block on: for all that
  // they have done up to here, and for what that came after.
  for (const Lane& lane : block->recorded) {
    const Clock& done = clocks[lane];
    std::erase_if(block->read, [&](const auto& read) { return before(done, read.first, read.second); });
    if (before(done, block->written.first, block->written.second)) block->written = {{-1, 0}, 0};
  }
  block->recorded.clear();
  pool[{block->home, block->size}].push_back(block);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    Locked held(lock);
    Lane home{device_now, stream_now[device_now]};
    if (nbytes == 0) return {nullptr, nullptr, &release, device_at(home.first)};
    size_t size = (nbytes + ROUND - 1) / ROUND * ROUND;
    auto& stats = statistics[home.first];
    if (total(stats.allocated_bytes).current + static_cast<int64_t>(size) > capacity[home.first]) {
      stats.num_ooms += 1;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "out of memory on the emulated accelerator: ", size, " bytes");
    }
    auto& free = pool[{home, size}];
    Block* block;
    if (free.empty()) {
      block = new Block{std::aligned_alloc(ROUND, size), size, home};
      blocks[block->data] = block;
      total(stats.reserved_bytes).increase(size);
    } else {
      block = free.back();
      free.pop_back();
      if (!block->reserved) total(stats.reserved_bytes).increase(size);
      block->reserved = true;
    }
    block->used = true;
    std::memset(block->data, 0xA5, size);  // nothing that was there before is read by chance
    total(stats.allocated_bytes).increase(size);
    if (allocations) allocations->emplace_back(reinterpret_cast<int64_t>(block->data), static_cast<int64_t>(size));
    return {block->data, block->data, &release, device_at(home.first)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Locked held(lock);
    auto found = blocks.find(data.get_context());
    if (found != blocks.end()) found->second->recorded.insert(lane_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Locked held(lock);
    return statistics[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Locked held(lock);
    total(statistics[device].allocated_bytes).reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Locked held(lock);
    total(statistics[device].allocated_bytes).reset_peak();
    total(statistics[device].reserved_bytes).reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Locked held(lock);
    int64_t used = total(statistics[device].reserved_bytes).current;
    int64_t all = std::min<int64_t>(capacity[device], int64_t{16} << 30);
    return {static_cast<size_t>(std::max<int64_t>(all - used, 0)), static_cast<size_t>(all)};
  }
};
Allocator allocator;

Block* block_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != KIND || !tensor.has_storage()) return nullptr;
  Locked held(lock);  // autograd has a thread for each device
  auto found = blocks.find(tensor.storage().data_ptr().get_context());
  return found == blocks.end() ? nullptr : found->second;
}

std::string named(const Lane& lane) {
  return "stream " + std::to_string(lane.second) + " of device " + std::to_string(lane.first);
}

void conflict(const char* what, const std::string& kernel, const Lane& here, const Lane& there, const Block& block) {
  races.push_back(kernel + " on " + named(here) + " " + what + " on " + named(there) + " (" +
                  std::to_string(block.size) + " bytes, last written by " + block.writer + ")");
}

void launch(const std::string& kernel, int device, const std::vector<Block*>& reads, const std::vector<Block*>& writes) {
  Locked held(lock);
  Lane here{device, stream_now[device]};
  Clock& clock = clocks[here];
  merge(clock, host);
  int64_t tick = ++clock[here];
  kernels += 1;
  auto written_before = [&](Block* block) {
    const auto& [lane, when] = block->written;
    return lane.first < 0 || lane == here || before(clock, lane, when);
  };
  for (Block* block : reads) {
    if (!written_before(block)) conflict("reads what is being written", kernel, here, block->written.first, *block);
    block->read[here] = tick;
  }
  for (Block* block : writes) {
    if (!written_before(block)) conflict("writes what is being written", kernel, here, block->written.first, *block);
    for (const auto& [lane, when] : block->read) {
      if (lane != here && !before(clock, lane, when)) conflict("writes what is being read", kernel, here, lane, *block);
    }
    block->read.clear();
    block->written = {here, tick};
    block->writer = kernel;
  }
}

void fail_if_asked(const std::string& kernel) {
  Locked held(lock);
  auto found = failing.find(kernel);
  if (found == failing.end() || found->second == 0) return;
  found->second -= 1;
  statistics[device_now].num_ooms += 1;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "out of memory on the emulated accelerator, in ", kernel);
}

// A copy to the CPU that nobody has waited for: until then there is something else in its memory.
struct Pending {
  Lane lane;
  int64_t tick;
  at::Tensor to;
  std::vector<char> bytes;
};
std::vector<Pending> pending;

// What comes after such copies sees what they have copied.
void arrive(const Clock& clock) {
  std::erase_if(pending, [&](const Pending& copy) {
    if (!before(clock, copy.lane, copy.tick)) return false;
    std::memcpy(copy.to.data_ptr(), copy.bytes.data(), copy.bytes.size());
    return true;
  });
}

void wait_for(const Clock& clock) {
  merge(host, clock);
  arrive(host);
  host_waits += 1;
}

// The host reads what a device has made: it waits for the current stream.
void wait_for_current(int device) {
  Locked held(lock);
  wait_for(clocks[{device, stream_now[device]}]);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return device_at(device_now); }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) {
      TORCH_CHECK(device.index() < DEVICES, "there are ", DEVICES, " emulated devices");
      device_now = device.index();
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) device_now = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(index_of(device), stream_now[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(index_of(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    Locked held(lock);
    return stream(index_of(device), ++streams_made);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    c10::Stream old = getStream(next.device());
    stream_now[next.device_index()] = next.id();
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    Locked held(lock);
    if (!*event) *event = new Event;
    Clock& clock = clocks[lane_of(on)];
    merge(clock, host);
    static_cast<Event*>(*event)->clock = clock;
  }
  void block(void* event, const c10::Stream& on) const override {
    if (!event) return;
    Locked held(lock);
    merge(clocks[lane_of(on)], static_cast<Event*>(event)->clock);
    stream_waits += 1;
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& on) const override { wait_for_clock(clocks[lane_of(on)]); }
  void synchronizeEvent(void* event) const override {
    if (event) wait_for_clock(static_cast<Event*>(event)->clock);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Locked held(lock);
    Clock all;
    for (const auto& [lane, clock] : clocks) {
      if (lane.first == device) merge(all, clock);
    }
    wait_for(all);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    allocator.recordStream(data, on);
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }

 private:
  static c10::Stream stream(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device_at(device), id);
  }
  static void wait_for_clock(const Clock& clock) {
    Locked held(lock);
    wait_for(clock);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -------------------------------------------------------------------------------------- generators

// A seed and how often was drawn, kept on the host as CUDA's are.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(KIND, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, drawn_ = 0; }
  void set_offset(uint64_t offset) override { drawn_ = offset; }
  uint64_t get_offset() const override { return drawn_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "a state of the emulated accelerator has 16 bytes");
    const auto* data = static_cast<const uint64_t*>(state.data());
    seed_ = data[0], drawn_ = data[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* data = static_cast<uint64_t*>(state.data_ptr());
    data[0] = seed_, data[1] = drawn_;
    return state.getIntrusivePtr();
  }
  // A generator for the CPU's kernel, of this state; the state moves on.
  at::Generator draw() {
    return at::detail::createCPUGenerator(seed_ * 0x9E3779B97F4A7C15ull + drawn_++ * 0xBF58476D1CE4E5B9ull + 1);
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_, copy->drawn_ = drawn_;
    return copy;
  }
  uint64_t seed_ = c10::detail::getNonDeterministicRandom(), drawn_ = 0;
};

const at::Generator& default_generator(int device) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < DEVICES; ++i) made.push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(i)));
    return made;
  }();
  return generators.at(device < 0 ? device_now : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice(device_at(device)); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(device_now); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice(device_at(device)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(static_cast<c10::DeviceIndex>(device < 0 ? device_now : device));
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DataPtr data = allocator.allocate(size);
    size_t kept = std::min(size, storage.nbytes());
    if (kept) std::memcpy(data.get(), storage.data(), kept);
    storage.set_data_ptr(std::move(data));
    storage.set_nbytes(size);
  }
};

// ----------------------------------------------------------------------------------------- kernels

thread_local bool inside = false;  // of a kernel: its copies to the CPU and back are no kernels

struct Inside {
  Inside() : was(inside) { inside = true; }
  ~Inside() { inside = was; }
  bool was;
};

template <class F>
void each_tensor(const c10::IValue& value, F&& call) {
  if (value.isTensor()) {
    call(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) call(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) each_tensor(item, call);
  }
}

void add(std::vector<Block*>& to, const at::Tensor& tensor) {
  if (Block* block = block_of(tensor)) to.push_back(block);
}

// Draws go to a generator of the CPU that the device's own state decides.
class Drawn {
 public:
  Drawn(const c10::OperatorHandle& op, torch::jit::Stack* stack, int device) {
    const auto& arguments = op.schema().arguments();
    size_t first = stack->size() - arguments.size();
    bool takes = false;
    for (size_t i = 0; i < arguments.size(); ++i) {
      c10::IValue& value = (*stack)[first + i];
      bool generator = arguments[i].type()->str().find("Generator") != std::string::npos;
      if (!generator) continue;
      takes = true;
      at::Generator given = value.isNone() ? default_generator(device) : value.toGenerator();
      if (given.device().type() == KIND) value = drawn_from(given);
    }
    if (takes || !op.hasTag(at::Tag::nondeterministic_seeded)) return;
    at::Generator drawn = drawn_from(default_generator(device));
    at::Generator cpu = at::detail::getDefaultCPUGenerator();
    Locked held(lock);
    before_ = cpu.get_state();
    cpu.set_state(drawn.get_state());
  }
  ~Drawn() {
    if (!before_.defined()) return;
    at::Generator cpu = at::detail::getDefaultCPUGenerator();
    cpu.set_state(before_);
  }

 private:
  static at::Generator drawn_from(at::Generator generator) {
    Locked held(lock);
    return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->draw();
  }
  at::Tensor before_;
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  fail_if_asked(schema.name());
  size_t first = stack->size() - schema.arguments().size();
  std::vector<Block*> reads, writes;
  int device = -1;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    bool written = alias && alias->isWrite();
    each_tensor((*stack)[first + i], [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.device().type() == KIND && device < 0) device = tensor.device().index();
      add(written ? writes : reads, tensor);
    });
  }
  if (device < 0) device = device_now;
  c10::DeviceGuard on(device_at(device));
  Drawn drawn(op, stack, device);
  {
    Inside kernel;
    at::native::cpu_fallback(op, stack);
  }
  fail_if_asked(schema.name() + ", late");  // having written and drawn what it does
  if (inside) return;
  size_t results = schema.returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); ++i) {
    each_tensor((*stack)[i], [&](const at::Tensor& tensor) {
      Block* block = block_of(tensor);
      auto found = [&](const std::vector<Block*>& all) { return std::find(all.begin(), all.end(), block) != all.end(); };
      if (block && !found(reads) && !found(writes)) writes.push_back(block);
    });
  }
  launch(schema.name(), device, reads, writes);
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard on(device_at(index_of(device.value_or(device_at(device_now)))));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, keys,
                                   dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard on(device_at(index_of(device.value_or(device_at(device_now)))));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           keys, dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

// The same memory as the CPU sees it.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  at::Tensor alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                                   at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (self.numel() == 0) return to;
  bool leaves = to.device().is_cpu();
  int device = (leaves ? self : to).device().index();
  if (!inside && self.device().is_cpu()) {
    Locked held(lock);
    arrive(clocks[{device, stream_now[device]}]);
  }
  on_cpu(to).copy_(on_cpu(self));
  if (inside) return to;
  std::vector<Block*> reads, writes;
  add(reads, self);
  add(writes, to);
  launch("copy", device, reads, writes);
  if (self.device().type() == KIND && to.device().type() == KIND && self.device() != to.device()) {
    // Between devices torch orders both streams around the copy; here the copy runs on the target's.
    Locked held(lock);
    Lane from{self.device().index(), stream_now[self.device().index()]};
    merge(clocks[from], clocks[{device, stream_now[device]}]);
  }
  if (non_blocking && leaves && to.is_contiguous()) {
    Locked held(lock);
    Lane here{device, stream_now[device]};
    auto* data = static_cast<char*>(to.data_ptr());
    pending.push_back({here, clocks[here][here], to.detach(), std::vector<char>(data, data + to.nbytes())});
    std::memset(data, 0x5A, to.nbytes());
  }
  if (!non_blocking && (leaves || self.device().is_cpu())) wait_for_current(device);
  return to;
}

// The streams of both devices are ordered before a copy from one to the other reads anything.
at::Tensor copy_between(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (!inside && self.device().type() == KIND && to.device().type() == KIND && self.device() != to.device()) {
    Locked held(lock);
    Lane from{self.device().index(), stream_now[self.device().index()]};
    merge(clocks[from], host);
    merge(clocks[{to.device().index(), stream_now[to.device().index()]}], clocks[from]);
  }
  return copy_from(self, to, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) const_cast<at::Tensor&>(to).resize_(self.sizes());
  return copy_between(self, to, false);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Scalar local_scalar(const at::Tensor& self) {
  if (!inside) {
    std::vector<Block*> reads;
    add(reads, self);
    launch("item", self.device().index(), reads, {});
    wait_for_current(self.device().index());
  }
  Inside kernel;
  return at::_local_scalar_dense(on_cpu(self));
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  allocator.recordStream(self.storage().data_ptr(), stream);
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset.guard_int(__FILE__, __LINE__),
                                      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

// torch knows no convolution of a device of its own but these two, which have no kernel on the CPU.
at::Tensor from_cpu(const at::Tensor& made, c10::Device device, std::vector<Block*>& writes) {
  if (!made.defined()) return made;
  at::Tensor result = made.to(device);
  add(writes, result);
  return result;
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  c10::DeviceGuard on(input.device());
  fail_if_asked("aten::convolution");
  std::vector<Block*> reads, writes;
  at::Tensor made;
  {
    Inside kernel;
    std::optional<at::Tensor> offset;
    if (bias && bias->defined()) add(reads, *bias), offset = on_cpu(*bias);
    made = at::convolution(on_cpu(input), on_cpu(weight), offset, stride, padding, dilation, transposed, output_padding, groups);
    made = from_cpu(made, input.device(), writes);
  }
  add(reads, input), add(reads, weight);
  launch("aten::convolution", input.device().index(), reads, writes);
  return made;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  c10::DeviceGuard on(input.device());
  std::vector<Block*> reads, writes;
  std::tuple<at::Tensor, at::Tensor, at::Tensor> made;
  {
    Inside kernel;
    std::optional<at::IntArrayRef> bias;
    int64_t channels = grad.size(1);
    if (mask[2]) bias = at::IntArrayRef(&channels, 1);
    auto [a, b, c] = at::convolution_backward(on_cpu(grad), on_cpu(input), on_cpu(weight), bias, stride, padding,
                                              dilation, transposed, output_padding, groups, mask);
    made = {from_cpu(a, input.device(), writes), from_cpu(b, input.device(), writes), from_cpu(c, input.device(), writes)};
  }
  add(reads, grad), add(reads, input), add(reads, weight);
  launch("aten::convolution_backward", input.device().index(), reads, writes);
  return made;
}

// It moves running statistics without saying so, which a copy to the CPU and back would lose.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double eps) {
  c10::DeviceGuard on(input.device());
  fail_if_asked("aten::native_batch_norm");
  std::vector<Block*> reads, writes;
  auto seen = [](const std::optional<at::Tensor>& tensor, std::vector<Block*>& by) -> std::optional<at::Tensor> {
    if (!tensor || !tensor->defined()) return {};
    add(by, *tensor);
    return on_cpu(*tensor);
  };
  add(reads, input);
  std::tuple<at::Tensor, at::Tensor, at::Tensor> made;
  {
    Inside kernel;
    auto scale = seen(weight, reads), shift = seen(bias, reads);
    auto average = seen(mean, training ? writes : reads), spread = seen(variance, training ? writes : reads);
    auto [a, b, c] = at::native_batch_norm(on_cpu(input), scale, shift, average, spread, training, momentum, eps);
    fail_if_asked("aten::native_batch_norm, late");
    made = {from_cpu(a, input.device(), writes), from_cpu(b, input.device(), writes), from_cpu(c, input.device(), writes)};
  }
  launch("aten::native_batch_norm", input.device().index(), reads, writes);
  return made;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  int64_t items = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {items}, {1});
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("_copy_from", &copy_between);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("native_batch_norm", &batch_norm);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

// A copy resolves what is lazily conjugated or negated by itself.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace

namespace at::autocast {

// The lists of CUDA's autocast.
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SINGLE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SINGLE_IF_NOT_GIVEN(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(SINGLE)
  AT_FORALL_FP32_SET_OPT_DTYPE(SINGLE_IF_NOT_GIVEN)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(WIDEST)
}

}  // namespace at::autocast

PYBIND11_MODULE(_emulated_accelerator, m) {
  static Hooks hooks;
  c10::SetAllocator(KIND, &allocator, 1);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("races", [] {
    Locked held(lock);
    return std::exchange(races, {});
  });
  m.def("settle", [] {  // all that runs anywhere is over
    Locked held(lock);
    for (const auto& [lane, clock] : clocks) merge(host, clock);
    arrive(host);
  });
  m.def("counts", [] {
    Locked held(lock);
    return std::map<std::string, int64_t>{{"kernels", kernels}, {"host_waits", host_waits}, {"stream_waits", stream_waits}};
  });
  // As where another process takes the rest: the allocator returns what it has and nobody uses.
  m.def("set_capacity", [](int device, int64_t nbytes) {
    Locked held(lock);
    capacity[device] = nbytes;
    for (const auto& [key, free] : pool) {
      if (key.first.first != device) continue;
      for (Block* block : free) {
        if (block->reserved) total(statistics[device].reserved_bytes).decrease(block->size);
        block->reserved = false;
      }
    }
  });
  m.def("fail", [](const std::string& kernel, int64_t count) {
    Locked held(lock);
    failing[kernel] = count;
  });
  m.def("allocations", [] {  // what was allocated and released since the last call; the first begins it
    Locked held(lock);
    return std::exchange(allocations, std::vector<std::pair<int64_t, int64_t>>{}).value_or(std::vector<std::pair<int64_t, int64_t>>{});
  });
  m.def("device", [] { return device_now; });
  m.def("set_device", [](int device) { Guard().setDevice(device_at(device)); });
}
