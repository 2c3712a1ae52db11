//! Runs tasks one after the other in one process, as `cob run` would, so that they share the prefilled system prompt and
//! tools; `scripts/everyday.sh` judges them. On the CPU a cached prefix gives the same bits as a cold one, so the answers
//! are those of `cob run` with the same seed.
//!
//! Standard input: one `{"task", "cwd", "seed"}` a line; standard output: one result a line, with the keys of
//! `cob run --output-format json` that a judge needs.

use std::io::BufRead;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use cob::agent::{Agent, Settings, Stop, Toolbox, instruct};
use cob::chat::LanguageModel;
use cob::chat::qwen::{Options, Qwen};
use cob::hub::{Hub, HubSettings};
use cob::message::{Habits, ReminderAt, Sampling};
use cob::model::{Backend, KvType};
use cob::permission::{Headless, Mode, Permissions, Rules};
use cob::session::{RunInfo, Session};
use cob::tools::Tools;
use serde::Deserialize;
use serde_json::json;

#[derive(Parser)]
#[command(about = "Runs tasks from standard input in one process")]
struct Arguments {
    /// An id (`cob model list`), or a GGUF file.
    #[arg(long)]
    model: String,
    #[arg(long, default_value_t = 0.7)]
    temperature: f64,
    #[arg(long)]
    top_p: Option<f64>,
    #[arg(long)]
    top_k: Option<usize>,
    #[arg(long)]
    call_temperature: Option<f64>,
    #[arg(long)]
    no_rescue: bool,
    #[arg(long)]
    no_guard: bool,
    #[arg(long)]
    routing: Option<bool>,
    #[arg(long)]
    optional_margin: Option<f32>,
    #[arg(long)]
    reminder: Option<ReminderAt>,
    #[arg(long)]
    system: Option<String>,
    /// Seconds for one task.
    #[arg(long, default_value_t = 300)]
    timeout: u64,
}

#[derive(Deserialize)]
struct Task {
    task: String,
    cwd: PathBuf,
    seed: u64,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let a = Arguments::parse();
    let hub = Hub::new(HubSettings::from_env()?);
    let found = hub.installed(&a.model)?;
    let of_model = found.habits();
    let model: Arc<dyn LanguageModel> = Arc::new(Qwen::open(
        &found.path,
        Options {
            backend: Backend::cpu(),
            kv_type: KvType::F16,
            context_tokens: 32_768,
            cache_bytes: 1 << 30,
            store: None,
            drafts: true,
            id: found.id,
            digest: found.digest,
        },
    )?);
    let habits = Habits {
        reminder: a.reminder.unwrap_or(of_model.reminder),
        routing: a.routing.unwrap_or(of_model.routing),
        optional_margin: a.optional_margin.unwrap_or(of_model.optional_margin),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let sessions = tempfile::tempdir()?;
    for line in std::io::stdin().lock().lines() {
        let task: Task = serde_json::from_str(&line?)?;
        let base = Sampling::qwen();
        let sampling = Sampling {
            temperature: a.temperature,
            top_p: a.top_p.unwrap_or(base.top_p),
            top_k: a.top_k.unwrap_or(base.top_k),
            call_temperature: a.call_temperature.or(base.call_temperature),
            seed: task.seed,
            ..base
        };
        let (toolbox, _) = Toolbox::new(Tools::builtin(None)?.iter().cloned().collect());
        let (system, habits) = instruct(a.system.clone(), toolbox.specs(), habits);
        let settings = Settings {
            sampling,
            timeout: Some(Duration::from_secs(a.timeout)),
            guard: !a.no_guard,
            rescue: !a.no_rescue,
            habits,
            ..Settings::default()
        };
        let cwd = task.cwd.canonicalize()?;
        let mut rules = Rules::new(&cwd, Mode::AcceptEdits)?;
        rules.allow("Bash")?;
        let run = RunInfo {
            cob_version: env!("CARGO_PKG_VERSION").into(),
            model: model.info(),
            sampling,
            cwd: cwd.display().to_string(),
            tools: toolbox.specs().to_vec(),
            system,
            settings: serde_json::to_value(&settings)?,
        };
        let mut session = Session::create(sessions.path(), run)?;
        let permissions = Permissions::new(rules, Arc::new(Headless));
        let agent = Agent { model: model.clone(), toolbox, permissions, cwd, files: Arc::default(), settings };
        let outcome = runtime.block_on(agent.run(&mut session, Some(&task.task), &Stop::new(), &mut |_| {}));
        println!(
            "{}",
            json!({
                "stop_reason": outcome.stop_reason, "answer": outcome.answer, "turns": outcome.turns,
                "tool_calls": outcome.calls, "usage": outcome.usage, "error": outcome.error,
            })
        );
    }
    Ok(())
}
