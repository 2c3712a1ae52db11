//! Qwen2.5: files → weights, forward pass, KV storage, CPU kernels. Token ids → logits. Knows no text, roles or tools.

pub mod config;
mod cpu;
mod device;
mod device_kv;
pub mod gguf;
pub mod kv;
mod source;
pub mod weight;

use std::path::Path;

pub use self::config::Config;
pub use self::cpu::Tier;
pub use self::kv::{Kv, KvType};
pub use self::source::Source;

use self::cpu::CpuModel;
use self::device::DeviceModel;
use self::kv::KvShape;

/// Which rows' logits a forward pass computes; the output head is a third of a small model's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    None,
    Last,
    /// Of the last so many rows.
    Tail(usize),
    All,
}

/// What one sequence has in a forward pass.
pub struct Part<'a> {
    pub kv: &'a mut Kv,
    /// At least one; they stand at the positions after `kv`.
    pub ids: &'a [u32],
    pub logits: Logits,
}

#[derive(Clone, Debug)]
pub enum Error {
    Cancelled,
    Failed(String),
}

/// candle's error in one line, without the backtrace that it carries along under `RUST_BACKTRACE=1`.
pub fn candle_error(error: &candle_core::Error) -> String {
    use candle_core::Error::*;
    match error {
        WithBacktrace { inner, .. } => candle_error(inner),
        WithPath { inner, path } => format!("{}: {}", path.display(), candle_error(inner)),
        Context { inner, context } => format!("{context}: {}", candle_error(inner)),
        other => other.to_string().lines().collect::<Vec<_>>().join(" "),
    }
}

/// Where a model computes.
#[derive(Clone, Debug)]
pub enum Backend {
    /// Our own kernels.
    Cpu { tier: Tier, threads: usize },
    /// candle's tensors on a device. `exact`: with all weights dequantised to f32, the oracle of everything else.
    Candle { device: candle_core::Device, exact: bool },
}

impl Backend {
    /// The CPU with all its cores.
    pub fn cpu() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        Backend::Cpu { tier: Tier::detect(), threads }
    }

    /// Free memory of the device; `None` on the CPU, and where the device does not say.
    pub fn device_free_bytes(&self) -> Option<u64> {
        match self {
            Backend::Cpu { .. } => None,
            Backend::Candle { device, .. } => device::free_bytes(device),
        }
    }

    /// What a session records: equal names give equal bits on the CPU.
    pub fn name(&self) -> String {
        match self {
            Backend::Cpu { tier, .. } => tier.name().into(),
            Backend::Candle { device, exact } => {
                let device = match device.location() {
                    candle_core::DeviceLocation::Cpu => "candle-cpu",
                    candle_core::DeviceLocation::Cuda { .. } => "cuda",
                    candle_core::DeviceLocation::Metal { .. } => "metal",
                };
                format!("{device}{}", if *exact { "-exact" } else { "" })
            }
        }
    }
}

/// A loaded model.
pub struct Model {
    config: Config,
    backend: Backend,
    weights: Weights,
}

enum Weights {
    Cpu(Box<CpuModel>),
    Device(Box<DeviceModel>),
}

impl Model {
    /// Loads a GGUF file or a folder of safetensors, and packs or uploads all weights: the memory of the file, once.
    pub fn open(path: &Path, backend: Backend, kv_type: KvType) -> Result<Self, String> {
        Self::load(Source::open(path)?, backend, kv_type)
    }

    pub fn load(source: Source, backend: Backend, kv_type: KvType) -> Result<Self, String> {
        let config = source.config()?;
        let weights = match &backend {
            Backend::Cpu { tier, threads } => {
                Weights::Cpu(Box::new(CpuModel::load(source, config.clone(), *tier, *threads, kv_type)?))
            }
            Backend::Candle { device, exact } => {
                Weights::Device(Box::new(DeviceModel::load(source, config.clone(), device.clone(), kv_type, *exact)?))
            }
        };
        Ok(Model { config, backend, weights })
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    pub fn kv_shape(&self) -> KvShape {
        match &self.weights {
            Weights::Cpu(model) => model.kv_shape(),
            Weights::Device(model) => model.kv_shape(),
        }
    }

    /// An empty sequence.
    pub fn new_kv(&self) -> Kv {
        match &self.weights {
            Weights::Cpu(model) => Kv::blocks(model.kv_shape()),
            Weights::Device(model) => Kv::on_device(model.kv_shape(), model.device().clone()),
        }
    }

    /// A sequence from disk, where this model computes: on the CPU as it is, on a device a copy.
    pub fn take_in(&self, kv: Kv) -> Result<Kv, String> {
        match &self.weights {
            Weights::Cpu(_) => Ok(kv),
            Weights::Device(model) => kv.to_device(model.device().clone()).map_err(|error| candle_error(&error)),
        }
    }

    /// Evaluates `ids` (at least one) at the positions after `kv`, appends their keys and values, and returns the logits
    /// that were asked for, row after row. Costs time in proportion to `ids`, and the output head for each row of
    /// logits. `cancelled` is asked between layers; after an error `kv` is as it was.
    pub fn forward(
        &mut self,
        kv: &mut Kv,
        ids: &[u32],
        logits: Logits,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Vec<f32>, Error> {
        let rows = self.forward_batch(&mut [Part { kv, ids, logits }], cancelled)?;
        Ok(rows.into_iter().next().unwrap_or_default())
    }

    /// [`Model::forward`] for several sequences at once; the logits of each. On the CPU the weights are read once for all of them, and
    /// each has the bits that it would have alone. After an error all are as they were.
    pub fn forward_batch(&mut self, parts: &mut [Part], cancelled: &dyn Fn() -> bool) -> Result<Vec<Vec<f32>>, Error> {
        if parts.iter().any(|part| part.ids.is_empty()) {
            return Err(Error::Failed("there is no token to evaluate".into()));
        }
        match &mut self.weights {
            Weights::Cpu(model) => model.forward(parts, cancelled),
            Weights::Device(model) => model.forward_batch(parts, cancelled),
        }
    }
}
