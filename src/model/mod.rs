//! Qwen2.5: files → weights, forward pass, KV storage, CPU kernels. Token ids → logits. Knows no text, roles or tools.

pub mod config;
mod cpu;
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

/// Which rows' logits a forward pass computes; the output head is a third of a small model's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    None,
    Last,
    All,
}

#[derive(Debug)]
pub enum Error {
    Cancelled,
    Failed(String),
}

/// A loaded model.
pub struct Model {
    config: Config,
    cpu: CpuModel,
}

impl Model {
    pub fn open(path: &Path, threads: usize, kv_type: KvType, tier: Tier) -> Result<Self, String> {
        let source = Source::open(path)?;
        let config = source.config()?;
        let cpu = CpuModel::load(source, config.clone(), tier, threads, kv_type)?;
        Ok(Model { config, cpu })
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn new_kv(&self) -> Kv {
        Kv::new(self.cpu.kv_shape())
    }

    pub fn bytes(&self) -> usize {
        self.cpu.bytes()
    }

    pub fn forward(
        &mut self,
        kv: &mut Kv,
        ids: &[u32],
        logits: Logits,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Vec<f32>, Error> {
        self.cpu.forward(kv, ids, logits, cancelled)
    }
}
