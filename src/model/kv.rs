//! Keys and values of one sequence, in blocks of 64 positions that sequences share.
//!
//! A fork copies pointers; a write into a block that someone else holds copies that block first. So a prefix cache, a
//! rollback and a branch cost no prefill and almost no memory.
//!
//! Within a block, for each layer and KV head: K as `[8 tiles of 8 positions][dim][8]`, then V as
//! `[dim / 8][64 positions][8]`: attention reads both from front to back. With 8-bit codes the scales follow them, of K as
//! `[8 tiles][dim / 32][8]`, of V as `[dim / 32][64 positions]`.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use memmap2::Mmap;

use super::device_kv::DeviceKv;

/// Positions of a block.
pub const BLOCK: usize = 64;

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvType {
    #[default]
    F16,
    F32,
    /// Signed bytes, with an f16 scale for every 32 elements of a position; a head's length must be a multiple of 32. On the CPU only.
    Q8_0,
}

/// Elements of a head that share a scale in [`KvType::Q8_0`].
pub const SCALED: usize = 32;

/// The shape that all blocks of a model share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    pub layers: usize,
    pub kv_heads: usize,
    /// A multiple of 8, and of 32 for [`KvType::Q8_0`].
    pub head_dim: usize,
    pub kind: KvType,
}

impl KvShape {
    /// Bytes of K (or of V) of one layer and head in a block.
    pub const fn head_bytes(&self) -> usize {
        let elements = BLOCK * self.head_dim;
        match self.kind {
            KvType::F16 => 2 * elements,
            KvType::F32 => 4 * elements,
            KvType::Q8_0 => elements + elements / SCALED * 2,
        }
    }

    pub const fn block_bytes(&self) -> usize {
        self.layers * self.kv_heads * 2 * self.head_bytes()
    }

    /// Bytes of one position.
    pub const fn token_bytes(&self) -> usize {
        self.block_bytes() / BLOCK
    }

    /// Bytes for `tokens` positions, whole blocks counted.
    pub const fn bytes(&self, tokens: usize) -> usize {
        tokens.div_ceil(BLOCK) * self.block_bytes()
    }

    /// Byte offset of K of `(layer, head)` in a block; V follows after `head_bytes`.
    pub const fn offset(&self, layer: usize, head: usize) -> usize {
        (layer * self.kv_heads + head) * 2 * self.head_bytes()
    }
}

/// 64 positions of every layer and head.
pub enum Block {
    Own(Box<[u64]>),
    /// In a file that is mapped in: `len` bytes from `at` on. It is only read.
    Mapped {
        map: Arc<Mmap>,
        at: usize,
        len: usize,
    },
}

impl Block {
    fn zeroed(shape: &KvShape) -> Self {
        // Zeros and not garbage: a kernel may read whole vectors past the last position, and those must be finite.
        Block::Own(vec![0u64; shape.block_bytes() / 8].into_boxed_slice())
    }

    pub fn as_bytes(&self) -> &[u8] {
        match self {
            // SAFETY: any byte of a u64 is a u8.
            Block::Own(words) => unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), words.len() * 8) },
            Block::Mapped { map, at, len } => &map[*at..*at + *len],
        }
    }

    /// A block that `block` alone holds and can write: itself, or a copy in its place.
    fn writable(block: &mut Arc<Block>) -> *mut u8 {
        let own = matches!(Arc::get_mut(block), Some(Block::Own(_)));
        if !own {
            let mut words = vec![0u64; block.as_bytes().len() / 8].into_boxed_slice();
            // SAFETY: as many bytes as the block has.
            unsafe {
                std::ptr::copy_nonoverlapping(block.as_bytes().as_ptr(), words.as_mut_ptr().cast(), words.len() * 8);
            }
            *block = Arc::new(Block::Own(words));
        }
        match Arc::get_mut(block) {
            Some(Block::Own(words)) => words.as_mut_ptr().cast(),
            _ => unreachable!("it was just made so"),
        }
    }
}

/// The keys and values of one sequence. `clone` is a fork and cheap.
#[derive(Clone)]
pub struct Kv {
    shape: KvShape,
    len: usize,
    store: Store,
}

#[derive(Clone)]
enum Store {
    /// The CPU's.
    Blocks(Vec<Arc<Block>>),
    /// A device's.
    Device(DeviceKv),
}

impl Kv {
    pub(crate) fn blocks(shape: KvShape) -> Self {
        Kv { shape, len: 0, store: Store::Blocks(Vec::new()) }
    }

    pub(crate) fn on_device(shape: KvShape, device: Device) -> Self {
        Kv { shape, len: 0, store: Store::Device(DeviceKv::new(device)) }
    }

    /// `len` positions whose blocks lie in a mapped file, one after the other from byte `at` on.
    pub(crate) fn mapped(shape: KvShape, len: usize, map: Arc<Mmap>, at: usize) -> Self {
        let size = shape.block_bytes();
        let block = |i: usize| Arc::new(Block::Mapped { map: map.clone(), at: at + i * size, len: size });
        Kv { shape, len, store: Store::Blocks((0..len.div_ceil(BLOCK)).map(block).collect()) }
    }

    /// The same in the host's memory, as it is written to disk: on the CPU a fork, from a device a copy, which lies there in an order
    /// of its own.
    pub(crate) fn to_host(&self) -> candle_core::Result<Kv> {
        let Store::Device(device) = &self.store else { return Ok(self.clone()) };
        let blocks = device.to_host(&self.shape, self.len)?.into_iter().map(|words| Arc::new(Block::Own(words)));
        Ok(Kv { shape: self.shape, len: self.len, store: Store::Blocks(blocks.collect()) })
    }

    /// What [`Kv::to_host`] made, on a device again.
    pub(crate) fn to_device(&self, device: Device) -> candle_core::Result<Kv> {
        let store = DeviceKv::from_host(&self.shape, self.len, &self.block_bytes(), device)?;
        Ok(Kv { shape: self.shape, len: self.len, store: Store::Device(store) })
    }

    /// The blocks as they are in memory, front to back.
    pub(crate) fn block_bytes(&self) -> Vec<&[u8]> {
        let Store::Blocks(blocks) = &self.store else { panic!("this KV lives on a device") };
        blocks.iter().map(|block| block.as_bytes()).collect()
    }

    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Positions held.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Identity and bytes of every part of the storage: forks share parts.
    pub fn parts(&self) -> Vec<(usize, usize)> {
        match &self.store {
            Store::Blocks(blocks) => blocks.iter().map(|b| (Arc::as_ptr(b) as usize, b.as_bytes().len())).collect(),
            Store::Device(device) => device.part().into_iter().collect(),
        }
    }

    /// Bytes of the storage, shared parts counted in full.
    pub fn bytes(&self) -> usize {
        self.parts().iter().map(|&(_, bytes)| bytes).sum()
    }

    /// Forgets the positions from `len` on.
    pub fn truncate(&mut self, len: usize) {
        if len >= self.len {
            return;
        }
        self.len = len;
        match &mut self.store {
            Store::Blocks(blocks) => blocks.truncate(len.div_ceil(BLOCK)),
            Store::Device(device) if len == 0 => device.clear(),
            // What stands behind is written over by the next pass.
            Store::Device(_) => {}
        }
    }

    /// Makes room for `n` more positions that this sequence alone can write, and returns the addresses of all blocks.
    /// The length changes with [`Kv::advance`], once the positions are written.
    pub(crate) fn reserve(&mut self, n: usize) -> Vec<*mut u8> {
        let Store::Blocks(blocks) = &mut self.store else { panic!("this KV lives on a device") };
        let count = (self.len + n).div_ceil(BLOCK);
        while blocks.len() < count {
            blocks.push(Arc::new(Block::zeroed(&self.shape)));
        }
        let first = self.len / BLOCK;
        let address = |(i, block): (usize, &mut Arc<Block>)| {
            if i >= first { Block::writable(block) } else { block.as_bytes().as_ptr().cast_mut() }
        };
        blocks.iter_mut().enumerate().map(address).collect()
    }

    /// Gives back the room that was made and not used.
    pub(crate) fn drop_reserved(&mut self) {
        if let Store::Blocks(blocks) = &mut self.store {
            blocks.truncate(self.len.div_ceil(BLOCK));
        }
    }

    pub(crate) fn advance(&mut self, n: usize) {
        self.len += n;
    }

    /// Makes room on the device for `n` more positions. The length changes with [`Kv::advance`].
    pub(crate) fn reserve_on_device(&mut self, n: usize) -> candle_core::Result<()> {
        let Store::Device(device) = &mut self.store else { panic!("this KV lives on the CPU") };
        device.reserve(&self.shape, self.len, n)
    }

    /// Writes a layer's keys and values of the positions that were reserved, `[kv_heads, n, head_dim]` each, and returns all of it
    /// with them.
    pub(crate) fn write(&self, layer: usize, k: &Tensor, v: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
        let Store::Device(device) = &self.store else { panic!("this KV lives on the CPU") };
        device.write(layer, self.len, k, v)
    }
}
