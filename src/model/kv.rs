//! Keys and values of one sequence, in blocks of 64 positions that sequences share.
//!
//! A fork copies pointers; a write into a block that someone else holds copies that block first. So a prefix cache, a
//! rollback and a branch cost no prefill and almost no memory.
//!
//! Within a block, for each layer and KV head: K as `[8 tiles of 8 positions][dim][8]`, then V as
//! `[dim / 8][64 positions][8]`: attention reads both from front to back.

use std::sync::Arc;

/// Positions of a block.
pub const BLOCK: usize = 64;

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvType {
    #[default]
    F16,
    F32,
}

impl KvType {
    pub const fn bytes(self) -> usize {
        match self {
            KvType::F16 => 2,
            KvType::F32 => 4,
        }
    }
}

/// The shape that all blocks of a model share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    pub layers: usize,
    pub kv_heads: usize,
    /// A multiple of 8.
    pub head_dim: usize,
    pub kind: KvType,
}

impl KvShape {
    /// Elements of K (or of V) of one layer and head in a block.
    pub const fn head_len(&self) -> usize {
        BLOCK * self.head_dim
    }

    pub const fn block_bytes(&self) -> usize {
        self.layers * self.kv_heads * 2 * self.head_len() * self.kind.bytes()
    }

    /// Bytes for `tokens` positions, whole blocks counted.
    pub const fn bytes(&self, tokens: usize) -> usize {
        tokens.div_ceil(BLOCK) * self.block_bytes()
    }

    /// Byte offset of K of `(layer, head)` in a block; V follows after `head_len` elements.
    pub const fn offset(&self, layer: usize, head: usize) -> usize {
        (layer * self.kv_heads + head) * 2 * self.head_len() * self.kind.bytes()
    }
}

/// 64 positions of every layer and head.
#[derive(Clone)]
pub struct Block(Box<[u64]>);

impl Block {
    fn zeroed(shape: &KvShape) -> Self {
        // Zeros and not garbage: a kernel may read whole vectors past the last position, and those must be finite.
        Block(vec![0u64; shape.block_bytes() / 8].into_boxed_slice())
    }

    pub fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr().cast()
    }

    pub fn bytes(&self) -> usize {
        self.0.len() * 8
    }
}

/// The keys and values of one sequence. `clone` is a fork and cheap.
#[derive(Clone)]
pub struct Kv {
    shape: KvShape,
    len: usize,
    blocks: Vec<Arc<Block>>,
}

impl Kv {
    pub fn new(shape: KvShape) -> Self {
        Kv { shape, len: 0, blocks: Vec::new() }
    }

    /// A sequence over the first `len` positions of `blocks`.
    pub fn from_blocks(shape: KvShape, blocks: &[Arc<Block>], len: usize) -> Self {
        Kv { shape, len, blocks: blocks[..len.div_ceil(BLOCK)].to_vec() }
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

    pub fn blocks(&self) -> &[Arc<Block>] {
        &self.blocks
    }

    /// Bytes of the blocks, shared ones counted in full.
    pub fn bytes(&self) -> usize {
        self.blocks.len() * self.shape.block_bytes()
    }

    /// Forgets the positions from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.blocks.truncate(self.len.div_ceil(BLOCK));
    }

    /// Makes room for `n` more positions that this sequence alone can write, and returns the addresses of all blocks.
    /// The length changes with [`Kv::advance`], once the positions are written.
    pub(crate) fn reserve(&mut self, n: usize) -> Vec<*mut u8> {
        let blocks = (self.len + n).div_ceil(BLOCK);
        while self.blocks.len() < blocks {
            self.blocks.push(Arc::new(Block::zeroed(&self.shape)));
        }
        let first = self.len / BLOCK;
        self.blocks
            .iter_mut()
            .enumerate()
            .map(|(i, block)| {
                if i >= first { Arc::make_mut(block).0.as_mut_ptr().cast::<u8>() } else { block.as_ptr().cast_mut() }
            })
            .collect()
    }

    pub(crate) fn advance(&mut self, n: usize) {
        self.len += n;
        debug_assert!(self.len <= self.blocks.len() * BLOCK);
    }
}
