//! The flags that several commands share.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};

use crate::message::{ReminderAt, ToolChoice};
use crate::permission::Mode;

/// Which model, and how it is loaded.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Model")]
pub struct ModelOptions {
    /// An id (`cob model list`), a GGUF file, a safetensors folder, or for run and chat scripted:FILE (plays a list of
    /// replies, [{"text": "…"}, {"calls": [{"name": "Read", "arguments": {…}}]}, …]) [default: COB_MODEL, then the
    /// config, then the built-in default]
    #[arg(short, long, value_name = "ID|PATH", value_parser = NonEmptyStringValueParser::new())]
    pub model: Option<String>,
    /// Where the model computes
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: Device,
    /// Threads of the CPU [default: one for each core]
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<usize>,
    /// The length of the context that memory is kept for [default: what the model was made for, as far as memory allows]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub context_tokens: Option<usize>,
    /// How keys and values are stored
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    pub kv_type: KvType,
    /// Neither keep computed prefixes on disk nor look for them there (`cob cache list`)
    #[arg(long)]
    pub no_store: bool,
    /// Do not guess that what stood there before comes again (prompt lookup); the output is the same, only slower or faster
    #[arg(long)]
    pub no_drafts: bool,
    /// Fetch nothing; use what is here
    #[arg(long)]
    pub offline: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// CUDA or Metal if this build has it and the machine too, else the CPU
    Auto,
    Cpu,
    Cuda,
    Metal,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvType {
    F32,
    F16,
    /// Half the memory of f16; on the CPU only
    #[value(name = "q8_0")]
    Q8,
}

impl From<KvType> for crate::model::KvType {
    fn from(kind: KvType) -> Self {
        match kind {
            KvType::F32 => crate::model::KvType::F32,
            KvType::F16 => crate::model::KvType::F16,
            KvType::Q8 => crate::model::KvType::Q8_0,
        }
    }
}

/// How tokens are drawn.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingOptions {
    /// Temperature of the words of an answer; 0 is greedy [default: 0]
    #[arg(long, value_name = "T", value_parser = temperature, allow_negative_numbers = true)]
    pub temperature: Option<f64>,
    /// Temperature of what is decided or copied: which tool, and its arguments [default: 0]
    #[arg(long, value_name = "T", value_parser = temperature, allow_negative_numbers = true)]
    pub call_temperature: Option<f64>,
    /// Draw only from the K likeliest tokens; 0 is off [default: 20]
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Draw only from the likeliest tokens that together have this probability; 1 is off [default: 0.8]
    #[arg(long, value_name = "P", value_parser = probability, allow_negative_numbers = true)]
    pub top_p: Option<f64>,
    /// Draw only tokens that have this share of the likeliest one's probability; 0 is off [default: 0]
    #[arg(long, value_name = "P", value_parser = probability, allow_negative_numbers = true)]
    pub min_p: Option<f64>,
    /// Makes a run with the same model and settings repeat [default: drawn, and recorded]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

/// What the agent may do, and for how long.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Agent")]
pub struct AgentOptions {
    /// The system prompt [default: cob's own with tools, the model's without]
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// The folder to work in [default: the current one]
    #[arg(long, value_name = "DIR")]
    pub cwd: Option<PathBuf>,
    /// Go on with a session; without a task, from where it stopped. The beginning or the end of an id is enough where it fits
    /// just one
    #[arg(short, long, value_name = "ID")]
    pub resume: Option<String>,
    /// Go on with the newest session of the folder
    #[arg(short, long = "continue", conflicts_with = "resume")]
    pub continue_newest: bool,
    /// The built-in tools to offer, separated by commas; `none` for none [default: all, or those of
    /// the session]
    #[arg(long, value_name = "NAMES")]
    pub tools: Option<String>,
    /// Offer also the tools of a file (OpenAI, bare or MCP shape). They cannot run here: the model is told so when it calls
    /// one, and the call stands in the result
    #[arg(long, value_name = "FILE")]
    pub tool_file: Option<PathBuf>,
    /// auto, required, none, or the name of a tool; a call is forced in the first step only
    #[arg(long, value_name = "CHOICE", default_value = "auto", value_parser = tool_choice)]
    pub tool_choice: ToolChoice,
    /// Allow what a rule names; one rule a flag, which can be given several times. 'Edit' (Write too), 'Edit(src/**)' (paths as in
    /// .gitignore; //etc/hosts is absolute), 'Bash(git *)' (every part of a command line must be allowed), 'Bash'
    #[arg(long, value_name = "RULE")]
    pub allow: Vec<String>,
    /// default: reads in the workspace, the rest is asked for or, without a terminal, refused. accept-edits: writes in the
    /// workspace too. plan: reads only. dont-ask: as default, and nobody is asked. bypass: everything
    #[arg(long, value_name = "MODE", default_value = "default")]
    pub permission_mode: Mode,
    /// Steps of the model in one task
    #[arg(long, value_name = "N", default_value = "20", value_parser = positive)]
    pub max_turns: usize,
    /// Tokens of one reply
    #[arg(long, value_name = "N", default_value = "1024", value_parser = positive)]
    pub max_output_tokens: usize,
    /// Seconds for one task [default: no limit]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    pub timeout: Option<Duration>,
    /// Seconds for one call of a tool
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = seconds, allow_negative_numbers = true)]
    pub tool_timeout: Duration,
    /// End the task when the same call is made so many times in a row
    #[arg(long, value_name = "N", default_value = "3", value_parser = positive)]
    pub max_repeats: usize,
    /// Leave a call in a foreign form, such as bare JSON, as text
    #[arg(long)]
    pub no_rescue: bool,
    /// When the model is reminded to answer: when it repeats a call, or after every result [default: what suits the model]
    #[arg(long, value_name = "WHEN")]
    pub reminder: Option<ReminderAt>,
    /// Whether a reply begins with a line that names the tool it calls, or says that it answers [default: what suits the model]
    #[arg(long, value_name = "BOOL")]
    pub routing: Option<bool>,
    /// How much likelier than the end of a call an optional argument must be to be written, in nats [default: what suits the
    /// model]
    #[arg(long, value_name = "NATS", value_parser = nats, allow_negative_numbers = true)]
    pub optional_margin: Option<f32>,
    /// Let the model repeat a call that was already answered
    #[arg(long)]
    pub no_guard: bool,
}

impl AgentOptions {
    /// Whether a session that is there goes on.
    pub fn resumes(&self) -> bool {
        self.resume.is_some() || self.continue_newest
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// The answer on standard output, what happens on standard error
    Text,
    /// One object at the end
    Json,
    /// One event a line, `init` first and `result` last
    StreamJson,
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("a whole number from 1 on is needed".into()),
        Ok(number) => Ok(number),
    }
}

/// A few more threads than cores can be wanted for a measurement; thousands only take memory and time.
fn threads(text: &str) -> Result<usize, String> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    match positive(text)? {
        asked if asked > 4 * cores => Err(format!(
            "more threads than cores ({cores} here) only slow it down; at most {} can be asked for",
            4 * cores
        )),
        asked => Ok(asked),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: Option<f64> = text.parse().ok().filter(|seconds| *seconds > 0.0);
    let duration = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    duration.ok_or_else(|| "a number of seconds above 0 is needed".into())
}

fn temperature(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok();
    number.filter(|t| (0.0..=100.0).contains(t)).ok_or_else(|| "a number from 0 to 100 is needed".into())
}

fn nats(text: &str) -> Result<f32, String> {
    let number: Option<f32> = text.parse().ok();
    number.filter(|n| (0.0..=100.0).contains(n)).ok_or_else(|| "a number from 0 to 100 is needed".into())
}

fn probability(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok();
    number.filter(|p| (0.0..=1.0).contains(p)).ok_or_else(|| "a number from 0 to 1 is needed".into())
}

fn tool_choice(text: &str) -> Result<ToolChoice, String> {
    Ok(match text {
        "auto" => ToolChoice::Auto,
        "required" => ToolChoice::Required,
        "none" => ToolChoice::None,
        "" => return Err("auto, required, none, or the name of a tool is needed".into()),
        name => ToolChoice::Named(name.to_owned()),
    })
}
