//! The weight formats of GGUF: block layouts and their exact meaning in f32.

use half::{bf16, f16};

/// How the numbers of a tensor are stored. Layouts: ggml's `ggml-common.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q5_0,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

impl WeightType {
    /// From the type number of a GGUF tensor; `None` for one that we do not compute.
    pub fn from_ggml(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            6 => Self::Q5_0,
            8 => Self::Q8_0,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            30 => Self::BF16,
            _ => return None,
        })
    }

    pub fn ggml_dtype(self) -> candle_core::quantized::GgmlDType {
        use candle_core::quantized::GgmlDType as D;
        match self {
            Self::F32 => D::F32,
            Self::F16 => D::F16,
            Self::BF16 => D::BF16,
            Self::Q4_0 => D::Q4_0,
            Self::Q5_0 => D::Q5_0,
            Self::Q8_0 => D::Q8_0,
            Self::Q4K => D::Q4K,
            Self::Q5K => D::Q5K,
            Self::Q6K => D::Q6K,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q5_0 => "Q5_0",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// Weights in a block.
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 18,
            Self::Q5_0 => 22,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    pub fn is_float(self) -> bool {
        self.block_len() == 1
    }

    /// Bytes of a row of `k` weights; `k` is a multiple of [`Self::block_len`].
    pub const fn row_bytes(self, k: usize) -> usize {
        k / self.block_len() * self.block_bytes()
    }

    /// The weights of one row as f32. `raw`: `row_bytes(out.len())` bytes.
    pub fn dequantize(self, raw: &[u8], out: &mut [f32]) {
        assert_eq!(raw.len(), self.row_bytes(out.len()), "{} row", self.name());
        match self {
            Self::F32 => out
                .iter_mut()
                .zip(raw.chunks_exact(4))
                .for_each(|(o, b)| *o = f32::from_le_bytes(b.try_into().unwrap())),
            Self::F16 => out.iter_mut().zip(raw.chunks_exact(2)).for_each(|(o, b)| *o = half_at(b, 0)),
            Self::BF16 => out
                .iter_mut()
                .zip(raw.chunks_exact(2))
                .for_each(|(o, b)| *o = bf16::from_le_bytes([b[0], b[1]]).to_f32()),
            _ => {
                let groups = self.block_len() / 32;
                for (block, out) in raw.chunks_exact(self.block_bytes()).zip(out.chunks_exact_mut(self.block_len())) {
                    for (g, out) in (0..groups).zip(out.chunks_exact_mut(32)) {
                        let mut codes = [0; 32];
                        self.codes(block, g, &mut codes);
                        match self {
                            Self::Q4K | Self::Q5K => {
                                let (scale, min) = scale_min(&block[4..16], g);
                                let d = half_at(block, 0) * scale as f32;
                                let m = half_at(block, 2) * min as f32;
                                out.iter_mut().zip(codes).for_each(|(o, q)| *o = d * q as f32 - m);
                            }
                            Self::Q6K => {
                                let d = half_at(block, 208);
                                for (i, (o, q)) in out.iter_mut().zip(codes).enumerate() {
                                    let scale = block[192 + 2 * g + i / 16] as i8;
                                    *o = d * scale as f32 * (q as i32 - 32) as f32;
                                }
                            }
                            Self::Q8_0 => {
                                let d = half_at(block, 0);
                                out.iter_mut().zip(codes).for_each(|(o, q)| *o = d * (q as i8) as f32);
                            }
                            _ => {
                                let d = half_at(block, 0);
                                out.iter_mut().zip(codes).for_each(|(o, q)| *o = d * (q as i32 - self.zero()) as f32);
                            }
                        }
                    }
                }
            }
        }
    }

    /// What a code of 0 stands for, in code units: the weight is `d · (code − zero)`.
    pub const fn zero(self) -> i32 {
        match self {
            Self::Q4_0 => 8,
            Self::Q5_0 => 16,
            Self::Q6K => 32,
            _ => 0,
        }
    }

    /// The 32 codes of group `g` of a block, one a byte (of Q8_0: as i8).
    #[inline(always)]
    pub(crate) fn codes(self, block: &[u8], g: usize, out: &mut [u8; 32]) {
        match self {
            Self::Q4_0 => {
                for i in 0..16 {
                    out[i] = block[2 + i] & 15;
                    out[i + 16] = block[2 + i] >> 4;
                }
            }
            Self::Q5_0 => {
                let high = u32::from_le_bytes(block[2..6].try_into().unwrap());
                for i in 0..16 {
                    out[i] = block[6 + i] & 15 | ((high >> i) as u8 & 1) << 4;
                    out[i + 16] = block[6 + i] >> 4 | ((high >> (i + 16)) as u8 & 1) << 4;
                }
            }
            Self::Q8_0 => out.copy_from_slice(&block[2..34]),
            Self::Q4K => {
                let qs = &block[16 + 32 * (g / 2)..][..32];
                for i in 0..32 {
                    out[i] = qs[i] >> (4 * (g % 2)) & 15;
                }
            }
            Self::Q5K => {
                let (high, qs) = (&block[16..48], &block[48 + 32 * (g / 2)..][..32]);
                for i in 0..32 {
                    out[i] = qs[i] >> (4 * (g % 2)) & 15 | (high[i] >> g & 1) << 4;
                }
            }
            Self::Q6K => {
                let (half, part) = (g / 4, g % 4);
                let low = &block[64 * half + 32 * (part % 2)..][..32];
                let high = &block[128 + 32 * half..][..32];
                for i in 0..32 {
                    out[i] = low[i] >> (4 * (part / 2)) & 15 | (high[i] >> (2 * part) & 3) << 4;
                }
            }
            Self::F32 | Self::F16 | Self::BF16 => unreachable!("floats have no codes"),
        }
    }
}

/// The half float at byte `at`.
#[inline(always)]
pub(crate) fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Scale and minimum of group `g` (0..8) in the 12 packed bytes of a Q4_K or Q5_K block, 6 bits each.
#[inline(always)]
pub(crate) fn scale_min(q: &[u8], g: usize) -> (u8, u8) {
    if g < 4 {
        (q[g] & 63, q[g + 4] & 63)
    } else {
        (q[g + 4] & 15 | q[g - 4] >> 6 << 4, q[g + 4] >> 4 | q[g] >> 6 << 4)
    }
}
