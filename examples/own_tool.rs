//! A tool of your own and one run, on the library.
//!
//! `cargo run --release --example own_tool -- MODEL "How warm is it in Hanoi?"`, MODEL an id (`cob model list`) or a GGUF file.
//!
//! Without arguments a scripted model plays the part of the real one, so the example runs anywhere.

use std::sync::Arc;

use async_trait::async_trait;
use cob::agent::{Agent, Settings, Stop, Toolbox, instruct};
use cob::chat::LanguageModel;
use cob::chat::qwen::{Options, Qwen};
use cob::chat::scripted::{Reply, Scripted};
use cob::hub::{Hub, HubSettings};
use cob::message::{Habits, ToolSpec};
use cob::model::{Backend, KvType};
use cob::permission::{Access, Headless, Mode, Permissions, Rules};
use cob::session::{RunInfo, Session};
use cob::tools::{Tool, ToolContext, ToolOutput, spec_of};
use serde_json::{Value, json};

#[derive(schemars::JsonSchema, serde::Deserialize)]
#[allow(dead_code)]
struct Arguments {
    /// Name of the city.
    city: String,
}

struct Thermometer(ToolSpec);

#[async_trait]
impl Tool for Thermometer {
    fn spec(&self) -> &ToolSpec {
        &self.0
    }

    /// It touches nothing that a rule would have to allow.
    fn access(&self, _: &Value, _: &ToolContext) -> Result<Vec<Access>, String> {
        Ok(Vec::new())
    }

    fn read_only(&self) -> bool {
        true
    }

    async fn run(&self, arguments: Value, _: &ToolContext) -> ToolOutput {
        match arguments["city"].as_str() {
            Some("Hanoi" | "Hà Nội") => ToolOutput::ok("31 °C"),
            Some(city) => ToolOutput::error(format!("there is no thermometer in {city}; there is one in Hanoi")),
            None => ToolOutput::error("give the name of a city"),
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (model, habits): (Arc<dyn LanguageModel>, Habits) = match arguments.next() {
        Some(name) => {
            let found = Hub::new(HubSettings::from_env()?).installed(&name)?;
            let habits = found.habits();
            let options = Options {
                backend: Backend::cpu(),
                kv_type: KvType::F16,
                context_tokens: 4096,
                cache_bytes: 256 << 20,
                store: None,
                drafts: true,
                id: found.id,
                digest: found.digest,
            };
            (Arc::new(Qwen::open(&found.path, options)?), habits)
        }
        None => {
            let replies = [Reply::call("thermometer", json!({"city": "Hanoi"})), Reply::text("It is 31 °C in Hanoi.")];
            (Arc::new(Scripted::new(replies)), Habits::default())
        }
    };
    let task = arguments.next().unwrap_or_else(|| "How warm is it in Hanoi?".into());

    let tool = Thermometer(spec_of::<Arguments>("thermometer", "Tells how warm it is in a city now."));
    let (toolbox, left_out) = Toolbox::new(vec![Arc::new(tool)]);
    assert!(left_out.is_empty(), "{left_out:?}");
    let cwd = std::env::current_dir()?;
    let (system, habits) = instruct(None, toolbox.specs(), habits);
    let settings = Settings { habits, ..Settings::default() };
    let sessions = tempfile::tempdir()?;
    let mut session = Session::create(
        sessions.path(),
        RunInfo {
            cob_version: env!("CARGO_PKG_VERSION").into(),
            model: model.info(),
            sampling: settings.sampling,
            cwd: cwd.display().to_string(),
            tools: toolbox.specs().to_vec(),
            system,
            settings: serde_json::to_value(&settings)?,
        },
    )?;
    let permissions = Permissions::new(Rules::new(&cwd, Mode::Default)?, Arc::new(Headless));
    let agent = Agent { model, toolbox, permissions, cwd, files: Arc::default(), settings };
    let outcome = agent.run(&mut session, Some(&task), &Stop::new(), &mut |_| {}).await;
    for call in &outcome.calls {
        println!("{} {} → {:?}", call.name, call.arguments, call.outcome);
    }
    println!("{:?}: {}", outcome.stop_reason, outcome.answer);
    Ok(())
}
