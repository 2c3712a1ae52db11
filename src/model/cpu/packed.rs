//! The one packed layout of a matrix, for prefill and decode alike.
//!
//! A matrix `[n, k]` (n outputs, k inputs, as GGUF stores it) becomes panels of 8 outputs. Within a panel the codes of a
//! group of 32 inputs stand as 8 vectors of 32 bytes; byte `4c + i` of vector `j` belongs to output `c` and input
//! `4j + i`, which is what `maddubs` + `madd` want. Codes stay as narrow as in the file: nibbles of vectors `2p` and
//! `2p + 1` share a byte, and the bits above the nibble stand in planes. So decode reads as many bytes as the file has.
//!
//! | type | a group of 32 inputs × 8 outputs | a block of 256 has in front | bits a weight |
//! |---|---|---|---:|
//! | Q4_0 | 128 B nibbles, 8 × f16 scale | | 4.5 |
//! | Q5_0 | 128 B nibbles, 32 B fifth bits, 8 × f16 scale | | 5.5 |
//! | Q8_0 | 256 B, 8 × f16 scale | | 8.5 |
//! | Q4_K | 128 B nibbles, 8 × u8 scale, 8 × u8 minimum | 8 × f16 d, 8 × f16 dmin | 4.63 |
//! | Q5_K | 128 B nibbles, 32 B fifth bits, scales and minima | the same | 5.63 |
//! | Q6_K | 128 B nibbles, 64 B upper bits, 8 × 2 × i8 scale | 8 × f16 d | 6.56 |
//! | floats | 8 values an input | | as stored |

use std::sync::Arc;

use memmap2::{MmapMut, MmapRaw};

use super::super::weight::{WeightType, scale_min};

/// Outputs of a panel.
pub(crate) const PANEL: usize = 8;
/// Inputs of a group: one activation scale each.
pub(crate) const GROUP: usize = 32;

/// A matrix `[n, k]` in the packed layout.
pub(crate) struct Packed {
    pub kind: WeightType,
    pub n: usize,
    pub k: usize,
    chunk: Arc<MmapRaw>,
    /// Of the first panel in the chunk.
    at: usize,
}

/// Memory for the matrices of one model, in large chunks: a matrix of its own pages would have few large ones, and those make the first
/// touch and the streaming of decode cheaper.
#[derive(Default)]
pub(crate) struct Arena {
    chunk: Option<Arc<MmapRaw>>,
    used: usize,
}

/// Bytes of a chunk; what is not used of it is not touched.
const CHUNK_BYTES: usize = 128 << 20;

impl Arena {
    /// Room for so many bytes, zeros, aligned to cache lines: the chunk and where in it.
    fn room(&mut self, bytes: usize) -> std::io::Result<(Arc<MmapRaw>, usize)> {
        if let Some(chunk) = &self.chunk
            && self.used + bytes <= chunk.len()
        {
            let at = self.used;
            self.used = (at + bytes).next_multiple_of(64);
            return Ok((chunk.clone(), at));
        }
        let map = MmapMut::map_anon(bytes.max(CHUNK_BYTES))?;
        // A kernel without large pages says no, and nothing is lost.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        let chunk = Arc::new(MmapRaw::from(map));
        (self.chunk, self.used) = (Some(chunk.clone()), bytes.next_multiple_of(64));
        Ok((chunk, 0))
    }
}

/// Bytes of one group of a panel.
pub(crate) const fn group_bytes(kind: WeightType) -> usize {
    match kind {
        WeightType::Q4_0 | WeightType::Q4K => 128 + 16,
        WeightType::Q5_0 | WeightType::Q5K => 128 + 32 + 16,
        WeightType::Q8_0 => 256 + 16,
        WeightType::Q6K => 128 + 64 + 16,
        WeightType::F32 => GROUP * PANEL * 4,
        WeightType::F16 | WeightType::BF16 => GROUP * PANEL * 2,
    }
}

/// Bytes in front of the 8 groups of a block of 256.
pub(crate) const fn header_bytes(kind: WeightType) -> usize {
    match kind {
        WeightType::Q4K | WeightType::Q5K => 32,
        WeightType::Q6K => 16,
        _ => 0,
    }
}

/// Bytes of a panel of `k` inputs.
pub(crate) const fn panel_bytes(kind: WeightType, k: usize) -> usize {
    if kind.block_len() == 1 {
        k * PANEL * kind.block_bytes()
    } else {
        k / GROUP * group_bytes(kind) + k / 256 * header_bytes(kind)
    }
}

impl Packed {
    /// Bytes that the packed form of `[n, k]` takes.
    pub fn bytes(kind: WeightType, n: usize, k: usize) -> usize {
        n.div_ceil(PANEL) * panel_bytes(kind, k)
    }

    /// An empty matrix, to be filled panel by panel with [`pack_panel`].
    pub fn empty(arena: &mut Arena, kind: WeightType, n: usize, k: usize) -> std::io::Result<Self> {
        let (chunk, at) = arena.room(Self::bytes(kind, n, k))?;
        Ok(Packed { kind, n, k, chunk, at })
    }

    pub fn panels(&self) -> usize {
        self.n.div_ceil(PANEL)
    }

    pub fn panel_bytes(&self) -> usize {
        panel_bytes(self.kind, self.k)
    }

    pub fn panel(&self, p: usize) -> &[u8] {
        let bytes = self.panel_bytes();
        assert!(p < self.panels());
        // SAFETY: within the matrix's room, which is written before the matrix is used and not afterwards.
        unsafe { std::slice::from_raw_parts(self.chunk.as_ptr().add(self.at + p * bytes), bytes) }
    }

    /// The address of the panels, for threads that fill different ones.
    pub fn base(&mut self) -> *mut u8 {
        // SAFETY: within the chunk.
        unsafe { self.chunk.as_mut_ptr().add(self.at) }
    }
}

/// Packs the outputs `8p..8p + 8` of `raw` (`[n]` rows of `kind.row_bytes(k)`) into `out`. Outputs past `n` are zero.
#[inline(always)]
pub(crate) fn pack_panel(kind: WeightType, raw: &[u8], n: usize, k: usize, p: usize, out: &mut [u8]) {
    // The type is a constant in each arm, so that its byte shuffling is compiled to vectors.
    match kind {
        WeightType::F32 => pack(WeightType::F32, raw, n, k, p, out),
        WeightType::F16 => pack(WeightType::F16, raw, n, k, p, out),
        WeightType::BF16 => pack(WeightType::BF16, raw, n, k, p, out),
        WeightType::Q4_0 => pack(WeightType::Q4_0, raw, n, k, p, out),
        WeightType::Q5_0 => pack(WeightType::Q5_0, raw, n, k, p, out),
        WeightType::Q8_0 => pack(WeightType::Q8_0, raw, n, k, p, out),
        WeightType::Q4K => pack(WeightType::Q4K, raw, n, k, p, out),
        WeightType::Q5K => pack(WeightType::Q5K, raw, n, k, p, out),
        WeightType::Q6K => pack(WeightType::Q6K, raw, n, k, p, out),
    }
}

#[inline(always)]
fn pack(kind: WeightType, raw: &[u8], n: usize, k: usize, p: usize, out: &mut [u8]) {
    let row_bytes = kind.row_bytes(k);
    let row = |c: usize| {
        let r = p * PANEL + c;
        (r < n).then(|| &raw[r * row_bytes..(r + 1) * row_bytes])
    };
    if kind.is_float() {
        let width = kind.block_bytes();
        for c in 0..PANEL {
            let Some(row) = row(c) else { continue };
            for (i, x) in row.chunks_exact(width).enumerate() {
                out[(i * PANEL + c) * width..][..width].copy_from_slice(x);
            }
        }
        return;
    }
    let (block_len, block_bytes) = (kind.block_len(), kind.block_bytes());
    let zeros = [0u8; 256];
    let mut at = 0;
    for b in 0..k / block_len {
        let blocks: [&[u8]; PANEL] = std::array::from_fn(|c| {
            row(c).map_or(&zeros[..block_bytes], |row| &row[b * block_bytes..(b + 1) * block_bytes])
        });
        for (c, block) in blocks.iter().enumerate() {
            match kind {
                WeightType::Q4K | WeightType::Q5K => {
                    out[at + 2 * c..][..2].copy_from_slice(&block[..2]);
                    out[at + 16 + 2 * c..][..2].copy_from_slice(&block[2..4]);
                }
                WeightType::Q6K => out[at + 2 * c..][..2].copy_from_slice(&block[208..210]),
                _ => {}
            }
        }
        at += header_bytes(kind);
        for g in 0..block_len / GROUP {
            let out = &mut out[at..at + group_bytes(kind)];
            pack_group(kind, &blocks, g, out);
            at += group_bytes(kind);
        }
    }
}

/// Group `g` of one block of 8 outputs.
#[inline(always)]
fn pack_group(kind: WeightType, blocks: &[&[u8]; PANEL], g: usize, out: &mut [u8]) {
    let (planes, scales) = out.split_at_mut(group_bytes(kind) - 16);
    // vectors[j][4c + i] = the code of output c, input 4j + i.
    let mut vectors = [[0u8; 32]; 8];
    for (c, block) in blocks.iter().enumerate() {
        let mut codes = [0; 32];
        kind.codes(block, g, &mut codes);
        for j in 0..8 {
            vectors[j][4 * c..4 * c + 4].copy_from_slice(&codes[4 * j..4 * j + 4]);
        }
        match kind {
            WeightType::Q4K | WeightType::Q5K => (scales[c], scales[8 + c]) = scale_min(&block[4..16], g),
            WeightType::Q6K => scales[2 * c..2 * c + 2].copy_from_slice(&block[192 + 2 * g..][..2]),
            _ => scales[2 * c..2 * c + 2].copy_from_slice(&block[..2]),
        }
    }
    if kind == WeightType::Q8_0 {
        for (plane, vector) in planes.chunks_exact_mut(32).zip(&vectors) {
            plane.copy_from_slice(vector);
        }
        return;
    }
    let (nibbles, high) = planes.split_at_mut(128);
    for (plane, pair) in nibbles.chunks_exact_mut(32).zip(vectors.chunks_exact(2)) {
        for i in 0..32 {
            plane[i] = pair[0][i] & 15 | pair[1][i] << 4;
        }
    }
    // Bits a code has above the nibble, and so vectors a plane.
    let bits = if kind == WeightType::Q6K { 2 } else { 1 };
    for (plane, vectors) in high.chunks_exact_mut(32).zip(vectors.chunks_exact(8 / bits)) {
        for (j, vector) in vectors.iter().enumerate() {
            for i in 0..32 {
                plane[i] |= vector[i] >> 4 << (bits * j);
            }
        }
    }
}
