//! Keys and values of a sequence in a device's memory. They grow in place: a token costs no copy of what is there.
//!
//! A fork shares the tensors of the sequence that it was made from. What both have is never written again; behind it the first one that
//! goes on writes in place, and the other copies what it has before it writes. A rollback (a rejected draft, a rescued call) writes in
//! place again what nobody else has.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use candle_core::{DType, Device, Result, Tensor};
use half::f16;

use super::kv::{BLOCK, KvShape, KvType};

/// Room is made for so many positions at a time at least.
const GROWTH: usize = 256;

/// The length is kept by whoever holds it.
pub(super) struct DeviceKv {
    device: Device,
    /// None as long as there is no position.
    buffer: Option<Arc<Buffer>>,
    /// Unlike that of every other one, a clone's too.
    id: u64,
}

/// One sequence writes, and others may read what was there when they were made from it. All of them are on one thread; the atomics are
/// for the compiler.
struct Buffer {
    /// Of each layer K and V, `[kv_heads, capacity, head_dim]`.
    layers: Vec<(Tensor, Tensor)>,
    capacity: usize,
    /// Positions that were written.
    taken: AtomicUsize,
    /// Who wrote last.
    writer: AtomicU64,
    /// Positions that others than the writer may have.
    shared: AtomicUsize,
}

impl Clone for DeviceKv {
    fn clone(&self) -> Self {
        if let Some(buffer) = &self.buffer {
            buffer.shared.store(buffer.taken.load(Ordering::Acquire), Ordering::Release);
        }
        DeviceKv { device: self.device.clone(), buffer: self.buffer.clone(), id: next_id() }
    }
}

fn next_id() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

impl Buffer {
    fn new(shape: &KvShape, capacity: usize, device: &Device) -> Result<Buffer> {
        let dtype = match shape.kind {
            KvType::F32 => DType::F32,
            KvType::F16 => DType::F16,
            KvType::Q8_0 => candle_core::bail!("keys and values of type q8_0 are for the CPU only"),
        };
        let tensor = || Tensor::zeros((shape.kv_heads, capacity, shape.head_dim), dtype, device);
        let layers = (0..shape.layers).map(|_| Ok((tensor()?, tensor()?))).collect::<Result<_>>()?;
        let (taken, shared, writer) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicU64::new(0));
        Ok(Buffer { layers, capacity, taken, writer, shared })
    }

    /// Whether nobody else has anything from position `len` on.
    fn is_free_from(&self, len: usize, id: u64) -> bool {
        let is_mine = self.writer.load(Ordering::Acquire) == id && len >= self.shared.load(Ordering::Acquire);
        is_mine || len == self.taken.load(Ordering::Acquire)
    }

    fn take(&self, len: usize, id: u64) {
        // What the one before had written stays its own.
        if self.writer.swap(id, Ordering::AcqRel) != id {
            self.shared.fetch_max(self.taken.load(Ordering::Acquire), Ordering::AcqRel);
        }
        self.taken.store(len, Ordering::Release);
    }
}

impl DeviceKv {
    pub fn new(device: Device) -> Self {
        DeviceKv { device, buffer: None, id: next_id() }
    }

    /// Identity and bytes of what forks share.
    pub fn part(&self) -> Option<(usize, usize)> {
        let buffer = self.buffer.as_ref()?;
        let bytes = |t: &Tensor| t.elem_count() * t.dtype().size_in_bytes();
        Some((Arc::as_ptr(buffer) as usize, buffer.layers.iter().map(|(k, v)| bytes(k) + bytes(v)).sum()))
    }

    pub fn clear(&mut self) {
        self.buffer = None;
    }

    /// Makes room for `n` positions behind the first `len`, which this sequence alone may write. Costs nothing where there is room; else
    /// a copy of the `len` positions on the device.
    pub fn reserve(&mut self, shape: &KvShape, len: usize, n: usize) -> Result<()> {
        let mut capacity = 0;
        if let Some(buffer) = &self.buffer {
            capacity = buffer.capacity;
            if len + n <= capacity && buffer.is_free_from(len, self.id) {
                buffer.take(len + n, self.id);
                return Ok(());
            }
        }
        // Half as much again, so that a long sequence is copied a few times and not once for every so many tokens.
        let grown = if len + n > capacity { (len + n).max(capacity + capacity / 2) } else { capacity };
        let next = Buffer::new(shape, grown.next_multiple_of(GROWTH), &self.device)?;
        if let (Some(buffer), 1..) = (&self.buffer, len) {
            for ((k, v), (old_k, old_v)) in next.layers.iter().zip(&buffer.layers) {
                k.slice_set(&old_k.narrow(1, 0, len)?.contiguous()?, 1, 0)?;
                v.slice_set(&old_v.narrow(1, 0, len)?.contiguous()?, 1, 0)?;
            }
        }
        next.take(len + n, self.id);
        self.buffer = Some(Arc::new(next));
        Ok(())
    }

    /// Writes `[kv_heads, n, head_dim]` of a layer behind its first `len` positions, in room that was reserved, and returns all
    /// `len + n` of them, as views.
    pub fn write(&self, layer: usize, len: usize, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let Some(buffer) = &self.buffer else { candle_core::bail!("no room was reserved") };
        let end = len + k.dim(1)?;
        let (all_k, all_v) = &buffer.layers[layer];
        all_k.slice_set(&k.contiguous()?, 1, len)?;
        all_v.slice_set(&v.contiguous()?, 1, len)?;
        Ok((all_k.narrow(1, 0, end)?, all_v.narrow(1, 0, end)?))
    }

    /// The first `len` positions in the host's memory, block by block: of each layer and head K and V, `[64 positions][head_dim]` in place
    /// of the CPU's tiles. Positions behind the last are zeros.
    pub fn to_host(&self, shape: &KvShape, len: usize) -> Result<Vec<Box<[u64]>>> {
        let mut blocks: Vec<Box<[u64]>> =
            (0..len.div_ceil(BLOCK)).map(|_| vec![0u64; shape.block_bytes() / 8].into_boxed_slice()).collect();
        let Some(buffer) = &self.buffer else { return Ok(blocks) };
        let row = shape.head_bytes() / BLOCK;
        for (layer, (k, v)) in buffer.layers.iter().enumerate() {
            for (which, tensor) in [k, v].into_iter().enumerate() {
                let flat = tensor.narrow(1, 0, len)?.contiguous()?.flatten_all()?;
                let bytes: Vec<u8> = match shape.kind {
                    KvType::F32 => flat.to_vec1::<f32>()?.into_iter().flat_map(f32::to_le_bytes).collect(),
                    _ => flat.to_vec1::<f16>()?.into_iter().flat_map(f16::to_le_bytes).collect(),
                };
                for (head, rows) in bytes.chunks_exact((len * row).max(1)).enumerate() {
                    let at = shape.offset(layer, head) + which * shape.head_bytes();
                    for (block, rows) in blocks.iter_mut().zip(rows.chunks(BLOCK * row)) {
                        words_as_bytes(block)[at..at + rows.len()].copy_from_slice(rows);
                    }
                }
            }
        }
        Ok(blocks)
    }

    /// The other way round.
    pub fn from_host(shape: &KvShape, len: usize, blocks: &[&[u8]], device: Device) -> Result<DeviceKv> {
        let mut kv = DeviceKv::new(device);
        if len == 0 {
            return Ok(kv);
        }
        kv.reserve(shape, 0, len)?;
        let row = shape.head_bytes() / BLOCK;
        for layer in 0..shape.layers {
            let tensor = |which: usize| -> Result<Tensor> {
                let mut bytes = Vec::with_capacity(shape.kv_heads * len * row);
                for head in 0..shape.kv_heads {
                    let at = shape.offset(layer, head) + which * shape.head_bytes();
                    for (i, block) in blocks.iter().enumerate() {
                        let rows = BLOCK.min(len - i * BLOCK);
                        bytes.extend(&block[at..at + rows * row]);
                    }
                }
                let dims = (shape.kv_heads, len, shape.head_dim);
                match shape.kind {
                    KvType::F32 => {
                        let values =
                            bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes")));
                        Tensor::from_vec(values.collect::<Vec<f32>>(), dims, &kv.device)
                    }
                    _ => {
                        let values =
                            bytes.chunks_exact(2).map(|b| f16::from_le_bytes(b.try_into().expect("two bytes")));
                        Tensor::from_vec(values.collect::<Vec<f16>>(), dims, &kv.device)
                    }
                }
            };
            kv.write(layer, 0, &tensor(0)?, &tensor(1)?)?;
        }
        Ok(kv)
    }
}

fn words_as_bytes(words: &mut [u64]) -> &mut [u8] {
    // SAFETY: any byte of a u64 is a u8, and bytes may hold anything.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len() * 8) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shape(kind: KvType) -> KvShape {
        KvShape { layers: 2, kv_heads: 2, head_dim: 8, kind }
    }

    /// A sequence, and each of its positions as the number that all its elements hold.
    #[derive(Clone)]
    struct Sequence {
        kv: DeviceKv,
        values: Vec<u32>,
    }

    impl Sequence {
        fn append(&mut self, shape: &KvShape, values: &[u32]) {
            let len = self.values.len();
            self.kv.reserve(shape, len, values.len()).unwrap();
            self.values.extend(values);
            for layer in 0..shape.layers {
                let tensor = |factor: f32| {
                    let rows = values.iter().map(|&value| value as f32 * factor + layer as f32);
                    let row: Vec<f32> = rows.flat_map(|value| [value; 8]).collect();
                    let head = Tensor::from_vec(row, (1, values.len(), 8), &Device::Cpu).unwrap();
                    Tensor::cat(&[&head, &head], 0).unwrap().to_dtype(dtype(shape)).unwrap()
                };
                let (k, v) = self.kv.write(layer, len, &tensor(1.0), &tensor(-1.0)).unwrap();
                assert_eq!((k.dims(), v.dims()), (&[2, self.values.len(), 8][..], &[2, self.values.len(), 8][..]));
            }
        }

        /// All that is there is what was written.
        fn check(&self, shape: &KvShape) {
            let Some(buffer) = &self.kv.buffer else { return assert!(self.values.is_empty()) };
            for (layer, (k, v)) in buffer.layers.iter().enumerate() {
                for (tensor, factor) in [(k, 1.0), (v, -1.0)] {
                    let rows = tensor.narrow(1, 0, self.values.len()).unwrap().to_dtype(DType::F32).unwrap();
                    let expected = self.values.iter().map(|&value| value as f32 * factor + layer as f32);
                    let expected: Vec<Vec<f32>> = expected.map(|value| vec![value; 8]).collect();
                    assert_eq!(rows.to_vec3::<f32>().unwrap(), vec![expected; shape.kv_heads]);
                }
            }
        }
    }

    fn dtype(shape: &KvShape) -> DType {
        if shape.kind == KvType::F32 { DType::F32 } else { DType::F16 }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Append(usize),
        Fork,
        Truncate(usize),
        Drop,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => prop_oneof![1usize..4, 100usize..300].prop_map(Step::Append),
            2 => Just(Step::Fork),
            2 => (0usize..400).prop_map(Step::Truncate),
            1 => Just(Step::Drop),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

        /// Sequences that fork, roll back and go on in any order, each of which keeps its own.
        #[test]
        fn no_sequence_writes_into_another(steps in prop::collection::vec((any::<prop::sample::Index>(), step()), 1..24)) {
            let shape = shape(KvType::F16);
            let mut all = vec![Sequence { kv: DeviceKv::new(Device::Cpu), values: Vec::new() }];
            let mut next = 0;
            for (which, step) in steps {
                let at = which.index(all.len());
                match step {
                    Step::Append(n) => {
                        // f16 has these exactly.
                        let values: Vec<u32> = (next..next + n as u32).map(|value| value % 2000).collect();
                        next += n as u32;
                        all[at].append(&shape, &values);
                    }
                    Step::Fork => all.push(all[at].clone()),
                    Step::Truncate(len) => {
                        all[at].values.truncate(len);
                        if all[at].values.is_empty() {
                            all[at].kv.clear();
                        }
                    }
                    Step::Drop if all.len() > 1 => drop(all.swap_remove(at)),
                    Step::Drop => {}
                }
                all.iter().for_each(|sequence| sequence.check(&shape));
            }
        }
    }

    #[test]
    fn what_went_to_the_host_comes_back() {
        for kind in [KvType::F16, KvType::F32] {
            let shape = shape(kind);
            for len in [0, 1, 63, 64, 65, 300] {
                let mut before = Sequence { kv: DeviceKv::new(Device::Cpu), values: Vec::new() };
                if len > 0 {
                    before.append(&shape, &(0..len).collect::<Vec<u32>>());
                }
                let blocks = before.kv.to_host(&shape, len as usize).unwrap();
                let bytes: Vec<Vec<u8>> =
                    blocks.into_iter().map(|mut block| words_as_bytes(&mut block).to_vec()).collect();
                let bytes: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
                let kv = DeviceKv::from_host(&shape, len as usize, &bytes, Device::Cpu).unwrap();
                Sequence { kv, values: before.values }.check(&shape);
            }
        }
    }

    /// Where it stays in place, and where it is copied.
    #[test]
    fn only_what_must_be_is_copied() {
        let shape = shape(KvType::F16);
        let mut one = Sequence { kv: DeviceKv::new(Device::Cpu), values: Vec::new() };
        one.append(&shape, &[1; 100]);
        let part = |sequence: &Sequence| sequence.kv.part().unwrap();
        let first = part(&one);
        assert_eq!(first.1, 256 * 8 * 2 * 2 * 2 * 2);
        one.append(&shape, &[2; 100]);
        let mut fork = one.clone();
        one.append(&shape, &[3; 20]);
        // A rollback that ends behind what the fork has.
        one.values.truncate(210);
        one.append(&shape, &[4; 10]);
        assert_eq!((part(&one), part(&fork)), (first, first));
        fork.append(&shape, &[5; 10]);
        assert_ne!(part(&fork), first);
        // One that ends within it.
        let fork = one.clone();
        one.values.truncate(150);
        one.append(&shape, &[6; 10]);
        assert_eq!(part(&fork), first);
        assert_ne!(part(&one), first);
        one.check(&shape);
        fork.check(&shape);
        one.append(&shape, &[7; 200]);
        assert_eq!(part(&one).1, 2 * first.1);
    }
}
