//! From flags to an agent: the one place where the rooms are put together.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::runtime::Runtime;

use super::args::Device;
use super::args::{AgentOptions, ModelOptions, SamplingOptions};
use super::progress::Progress;
use super::{model as model_command, scripted, tool_file};
use crate::agent::{Agent, NOTHING_LEFT, Settings, Stop, Toolbox, instruct, shows_routing};
use crate::chat::LanguageModel;
use crate::chat::qwen::{self, ChatFormat, Qwen};
use crate::chat::template::Template;
use crate::config::Config;
use crate::hub::{self, Folders, Hub, HubError, HubSettings, NeedsPull, Resolved};
use crate::message::{Habits, Sampling, StopReason, ToolChoice, ToolSpec};
use crate::model::kv::BLOCK;
use crate::model::{self, Backend, Source};
use crate::permission::{Approver, Permissions, Rules};
use crate::session::{self, RunInfo, Session, SessionError};
use crate::tools::{Tool, Tools};

/// Why a command cannot do its work.
#[derive(Debug)]
pub struct Fault {
    /// The exit code.
    pub code: u8,
    /// What the result of a run says.
    pub reason: StopReason,
    /// One line: what, why, and what to do.
    pub text: String,
}

impl Fault {
    pub fn usage(text: impl Into<String>) -> Fault {
        Fault { code: 2, reason: StopReason::Refused, text: text.into() }
    }

    pub fn refused(text: impl Into<String>) -> Fault {
        Fault { code: 4, reason: StopReason::Refused, text: text.into() }
    }

    pub fn failed(text: impl Into<String>) -> Fault {
        Fault { code: 1, reason: StopReason::Failed, text: text.into() }
    }

    pub fn stopped(reason: StopReason) -> Fault {
        Fault { code: super::exit_code(reason), reason, text: "stopped before the task began".into() }
    }
}

impl From<SessionError> for Fault {
    fn from(error: SessionError) -> Fault {
        let text = error.to_string();
        match error {
            SessionError::InvalidId(_) | SessionError::NotFound(_) | SessionError::Ambiguous(_) => Fault::usage(text),
            SessionError::NotAFile(_)
            | SessionError::Locked(_)
            | SessionError::Refused(_)
            | SessionError::Corrupt { .. } => Fault::refused(text),
            SessionError::Io { .. } => Fault::failed(text),
        }
    }
}

impl From<HubError> for Fault {
    fn from(error: HubError) -> Fault {
        let code = model_command::exit_code(error.kind, 130);
        let reason = match code {
            130 => StopReason::Interrupted,
            2 | 4 => StopReason::Refused,
            _ => StopReason::Failed,
        };
        Fault { code, reason, text: error.to_string() }
    }
}

/// What `run` and `chat` work with.
pub struct Prepared {
    pub agent: Agent,
    pub session: Session,
    pub resumed: bool,
    /// What the user must be told before it begins.
    pub said: Vec<String>,
}

/// The flags of a run.
pub struct Options<'a> {
    pub model: &'a ModelOptions,
    pub sampling: &'a SamplingOptions,
    pub agent: &'a AgentOptions,
    /// Whether the download of a model may be shown.
    pub quiet: bool,
    /// Whether there is no task, so that a session must have something left to do.
    pub no_task: bool,
}

/// Checks the flags, opens or creates the session, loads the model. What is cheap to refuse is refused first.
pub fn prepare(
    options: &Options<'_>,
    approver: Arc<dyn Approver>,
    runtime: &Runtime,
    stop: &Stop,
) -> Result<Prepared, Fault> {
    let flags = options.agent;
    let sessions = Folders::from_env()?.sessions;
    let (reopened, mut said) = match resumed_id(flags, &sessions)? {
        Some(id) => {
            let (session, said) = Session::open(&sessions, &id)?;
            if options.no_task && !session.is_unfinished() {
                return Err(Fault::refused(NOTHING_LEFT.to_owned()));
            }
            (Some(session), said)
        }
        None => (None, Vec::new()),
    };
    let before = reopened.as_ref().map(Session::run);
    let cwd = workspace(flags.cwd.as_deref(), before.map(|run| Path::new(&run.cwd)))?;
    let offered = match before {
        Some(run) if flags.tools.is_none() && flags.tool_file.is_none() => tools_of(run)?,
        _ => tools(flags.tools.as_deref(), flags.tool_file.as_deref())?,
    };
    let (toolbox, left_out) = Toolbox::new(offered);
    check_tool_choice(&flags.tool_choice, &toolbox, &left_out)?;
    said.extend(left_out);
    let rules = rules(flags, &cwd, &toolbox)?;
    let sampling = sampling(options.sampling, before.map(|run| run.sampling));
    let system = flags.system.clone().or_else(|| before.and_then(|run| run.system.clone()));

    let loaded = load_model(options.model, options.quiet, runtime, stop)?;
    said.extend(loaded.said);
    let mut settings = settings(flags, sampling, loaded.habits);
    if flags.routing.is_none() {
        // A resumed session goes on as it was; a system prompt of the user's own is not asked to follow ours.
        settings.habits.routing = match before {
            Some(run) => run.settings["habits"]["routing"] == true && flags.system.is_none(),
            None => loaded.habits.routing && flags.system.is_none(),
        };
    }
    let (system, habits) = instruct(system, toolbox.specs(), settings.habits);
    settings.habits = habits;
    let shown = system.as_deref().is_some_and(shows_routing);
    if flags.routing == Some(true) && !shown {
        said.push("--routing true has no effect: the system prompt shows no routing line".into());
    } else if flags.routing == Some(false) && shown {
        said.push(
            "--routing false, but the system prompt shows the routing line: the model will write it as text".into(),
        );
    }
    let run = RunInfo {
        cob_version: env!("CARGO_PKG_VERSION").into(),
        model: loaded.model.info(),
        sampling,
        cwd: cwd.display().to_string(),
        tools: toolbox.specs().to_vec(),
        system,
        settings: serde_json::to_value(&settings).unwrap_or(Value::Null),
    };
    let resumed = reopened.is_some();
    let session = match reopened {
        Some(mut session) => {
            said.extend(session.resumed(run)?);
            session
        }
        None => Session::create(&sessions, run)?,
    };
    let agent = Agent {
        model: loaded.model,
        toolbox,
        permissions: Permissions::new(rules, approver),
        cwd,
        files: Arc::default(),
        settings,
    };
    Ok(Prepared { agent, session, resumed, said })
}

/// The session that is to go on, if one is.
fn resumed_id(flags: &AgentOptions, sessions: &Path) -> Result<Option<String>, Fault> {
    if let Some(text) = &flags.resume {
        return Ok(Some(session::find(sessions, text)?));
    }
    if !flags.continue_newest {
        return Ok(None);
    }
    let cwd = workspace(flags.cwd.as_deref(), None)?;
    let found = session::latest(sessions, &cwd)?;
    let none = || Fault::usage(format!("no session works in {}; `cob session list` shows all", cwd.display()));
    found.map(Some).ok_or_else(none)
}

/// The folder of the flag, else that of the session, else the current one; absolute, links resolved.
fn workspace(flag: Option<&Path>, session: Option<&Path>) -> Result<PathBuf, Fault> {
    let wanted = flag.or(session).unwrap_or(Path::new("."));
    let found = wanted.canonicalize().map_err(|error| error.to_string());
    let found = found.and_then(|path| if path.is_dir() { Ok(path) } else { Err("it is not a folder".into()) });
    found.map_err(|why| {
        Fault::usage(format!("cannot work in {}: {why}; give the folder to work in with --cwd", wanted.display()))
    })
}

/// The built-in tools that are asked for, then those of the tool file.
pub fn tools(names: Option<&str>, file: Option<&Path>) -> Result<Vec<Arc<dyn Tool>>, Fault> {
    let names: Option<Vec<String>> = names.map(|names| match names.trim() {
        "" | "none" => Vec::new(),
        names => names.split(',').map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect(),
    });
    let builtin = Tools::builtin(names.as_deref()).map_err(|why| Fault::usage(format!("--tools: {why}")))?;
    let mut tools: Vec<Arc<dyn Tool>> = builtin.iter().cloned().collect();
    if let Some(file) = file {
        let specs = tool_file::read(file).map_err(Fault::usage)?;
        if let Some((number, name)) = tool_file::twice(&specs) {
            let why = format!("the tool file {}: tool {number}: there is a tool `{name}` before it", file.display());
            return Err(Fault::usage(why));
        }
        for spec in specs {
            tools.push(Arc::new(tool_file::Offered(spec)));
        }
    }
    Ok(tools)
}

/// The tools that a session had, so that it goes on with the prompt it began with.
fn tools_of(run: &RunInfo) -> Result<Vec<Arc<dyn Tool>>, Fault> {
    let builtin = Tools::builtin(None).map_err(Fault::failed)?;
    let tool = |spec: &ToolSpec| match builtin.get(&spec.name) {
        Some(tool) => tool.clone(),
        None => Arc::new(tool_file::Offered(spec.clone())) as Arc<dyn Tool>,
    };
    Ok(run.tools.iter().map(tool).collect())
}

fn check_tool_choice(choice: &ToolChoice, toolbox: &Toolbox, left_out: &[String]) -> Result<(), Fault> {
    let left_out: String = left_out.iter().map(|why| format!("; {why}")).collect();
    let names: Vec<&str> = toolbox.specs().iter().map(|spec| spec.name.as_str()).collect();
    match choice {
        ToolChoice::Named(name) if !names.contains(&name.as_str()) => {
            let offered = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            Err(Fault::usage(format!("--tool-choice: there is no tool `{name}`; offered are: {offered}{left_out}")))
        }
        ToolChoice::Required if names.is_empty() => {
            Err(Fault::usage(format!("--tool-choice required needs a tool, and none is offered{left_out}")))
        }
        _ => Ok(()),
    }
}

fn rules(flags: &AgentOptions, cwd: &Path, toolbox: &Toolbox) -> Result<Rules, Fault> {
    let mut rules = Rules::new(cwd, flags.permission_mode)
        .map_err(|error| Fault::failed(format!("cannot resolve {}: {error}", cwd.display())))?;
    if flags.allow.is_empty() {
        return Ok(rules);
    }
    let known: BTreeSet<String> = Tools::builtin(None)
        .map(|tools| tools.specs())
        .map_err(Fault::failed)?
        .into_iter()
        .chain(toolbox.specs().iter().cloned())
        .map(|spec| spec.name)
        .collect();
    for rule in &flags.allow {
        // A rule for a tool that does not exist would allow nothing, and nobody would know why.
        let name = rule.split('(').next().unwrap_or_default().trim();
        if !name.is_empty() && !known.iter().any(|known| known.eq_ignore_ascii_case(name)) {
            return Err(Fault::usage(format!(
                "--allow '{rule}': there is no tool `{name}`; one rule a flag, of {}",
                known.into_iter().collect::<Vec<_>>().join(", ")
            )));
        }
        rules.allow(rule).map_err(|why| Fault::usage(format!("--allow: {why}")))?;
    }
    Ok(rules)
}

/// The flags, else what the session had, else Qwen2.5's own. A seed that nobody gave is drawn; it has 53 bits, so that every
/// reader of JSON keeps it.
pub fn sampling(flags: &SamplingOptions, before: Option<Sampling>) -> Sampling {
    let base = before.unwrap_or_else(|| Sampling { seed: session::random_u64() >> 11, ..Sampling::qwen() });
    Sampling {
        temperature: flags.temperature.unwrap_or(base.temperature),
        top_k: flags.top_k.unwrap_or(base.top_k),
        top_p: flags.top_p.unwrap_or(base.top_p),
        min_p: flags.min_p.unwrap_or(base.min_p),
        repetition_penalty: base.repetition_penalty,
        call_temperature: flags.call_temperature.or(base.call_temperature),
        seed: flags.seed.unwrap_or(base.seed),
    }
}

fn settings(flags: &AgentOptions, sampling: Sampling, model: Habits) -> Settings {
    Settings {
        sampling,
        tool_choice: flags.tool_choice.clone(),
        max_turns: flags.max_turns,
        max_output_tokens: flags.max_output_tokens,
        timeout: flags.timeout,
        tool_timeout: flags.tool_timeout,
        max_repeats: flags.max_repeats,
        guard: !flags.no_guard,
        habits: Habits {
            reminder: flags.reminder.unwrap_or(model.reminder),
            routing: flags.routing.unwrap_or(model.routing),
            optional_margin: flags.optional_margin.unwrap_or(model.optional_margin),
        },
        rescue: !flags.no_rescue,
        ..Settings::default()
    }
}

/// A model that can be talked to, and how the loop treats it.
pub struct Loaded {
    pub model: Arc<dyn LanguageModel>,
    pub habits: Habits,
    /// What the user must be told.
    pub said: Vec<String>,
}

/// Finds, if need be fetches, and loads the model.
pub fn load_model(options: &ModelOptions, quiet: bool, runtime: &Runtime, stop: &Stop) -> Result<Loaded, Fault> {
    if let Some(script) = named(options).and_then(|name| name.strip_prefix("scripted:").map(PathBuf::from)) {
        let model = scripted::load(&script, options.context_tokens).map_err(Fault::usage)?;
        return Ok(Loaded { model, habits: Habits::default(), said: Vec::new() });
    }
    let found = find_model(options, quiet, stop)?;
    let habits = found.habits();
    let options = options.clone();
    let loading = runtime.spawn_blocking(move || load_qwen(&found, &options));
    let (model, said) = runtime.block_on(async {
        tokio::select! {
            loaded = loading => loaded.unwrap_or_else(|panic| Err(Fault::failed(format!("loading the model broke off: {panic}")))),
            reason = stop.requested(Duration::ZERO) => Err(Fault::stopped(reason)),
        }
    })?;
    Ok(Loaded { model, habits, said })
}

/// What the flag or the environment names.
fn named(options: &ModelOptions) -> Option<String> {
    options.model.clone().or_else(|| std::env::var("COB_MODEL").ok()).filter(|name| !name.is_empty())
}

/// The model that a run would use, if it is here; nothing is fetched. One that was named and is not here is a fault.
pub fn installed_model(options: &ModelOptions, stop: &Stop) -> Result<Option<hub::Model>, Fault> {
    let config = Config::load().map_err(Fault::usage)?;
    let hub = Hub::new(HubSettings { offline: true, ..HubSettings::from_env()? });
    let (flag, environment) = (options.model.as_deref(), std::env::var("COB_MODEL").ok());
    match hub.resolve(flag, environment.as_deref(), config.model.as_deref(), stop.token(), &mut |_| {})? {
        Resolved::Ready(model) => Ok(Some(model)),
        Resolved::NeedsPull(missing) if named(options).is_some() => Err(Fault::usage(format!(
            "the model {id} is not here; `cob model pull {id}` fetches it, and without --model (and COB_MODEL) the built-in tokenizer counts",
            id = missing.id
        ))),
        Resolved::NeedsPull(_) => Ok(None),
    }
}

/// The files of the model, fetched if they are not here.
pub fn find_model(options: &ModelOptions, quiet: bool, stop: &Stop) -> Result<hub::Model, Fault> {
    let config = Config::load().map_err(Fault::usage)?;
    let settings = HubSettings::from_env()?;
    let hub = Hub::new(HubSettings { offline: settings.offline || options.offline, ..settings });
    let environment = std::env::var("COB_MODEL").ok();
    let mut err: Box<dyn std::io::Write> = if quiet { Box::new(std::io::sink()) } else { Box::new(std::io::stderr()) };
    let terminal = !quiet && std::io::IsTerminal::is_terminal(&std::io::stderr());
    let mut progress = Progress::new(&mut *err, terminal);
    let resolve = |progress: &mut Progress<'_>| {
        let (flag, environment) = (options.model.as_deref(), environment.as_deref());
        hub.resolve(flag, environment, config.model.as_deref(), stop.token(), &mut |event| progress.event(event))
    };
    let stopped = |error: HubError| match (error.kind, stop.reason()) {
        (hub::Kind::Cancelled, Some(reason)) => Fault::stopped(reason),
        _ => Fault::from(error),
    };
    let missing = match resolve(&mut progress).map_err(stopped)? {
        Resolved::Ready(model) => return Ok(model),
        Resolved::NeedsPull(missing) => missing,
    };
    if !hub.settings().offline {
        progress.event(hub::HubEvent::Note(fetching(&missing)));
    }
    hub.pull(&missing.id, None, stop.token(), &mut |event| progress.event(event)).map_err(stopped)?;
    match resolve(&mut progress).map_err(stopped)? {
        Resolved::Ready(model) => Ok(model),
        Resolved::NeedsPull(missing) => Err(Fault::failed(format!(
            "{} was fetched, and yet it is not there; `cob model verify` looks closer",
            missing.id
        ))),
    }
}

fn fetching(missing: &NeedsPull) -> String {
    let have = match missing.bytes_have {
        0 => String::new(),
        bytes => format!(", {} of it here already", hub::human_bytes(bytes)),
    };
    format!("the model {} is not here yet; fetching it once ({}{have})", missing.id, missing.size())
}

/// Memory besides weights and KV: tokenizer, token trie of the grammars, buffers of a forward pass.
const OVERHEAD_BYTES: u64 = 300 << 20;

fn load_qwen(found: &hub::Model, options: &ModelOptions) -> Result<(Arc<dyn LanguageModel>, Vec<String>), Fault> {
    let store = if options.no_store { None } else { Some(Folders::from_env()?.kv) };
    let (model, said) = open_qwen(found, options, store)?;
    Ok((Arc::new(model), said))
}

/// Reads the weights and starts the engine, if the memory that it takes is there. `store`: where prefixes are kept. Says what was
/// decided.
pub fn open_qwen(
    found: &hub::Model,
    options: &ModelOptions,
    store: Option<PathBuf>,
) -> Result<(Qwen, Vec<String>), Fault> {
    let mut said = Vec::new();
    let source = Source::open(&found.path).map_err(Fault::refused)?;
    let config = source.config().map_err(Fault::refused)?;
    let kv_type = options.kv_type.into();
    let shape = config.kv_shape(kv_type);
    if let Some(asked) = options.context_tokens.filter(|&asked| asked > config.context) {
        return Err(Fault::usage(format!(
            "--context-tokens {asked}: {} was made for {} tokens; ask for at most that",
            found.id, config.context
        )));
    }
    let backend = backend(options)?;
    let (available, place) = match &backend {
        Backend::Cpu { .. } => (hub::available_bytes(), ""),
        Backend::Candle { .. } => (backend.device_free_bytes(), " of the device"),
    };
    if available.is_none() {
        said.push(format!(
            "how much memory{place} is free is not known here, so whether the model fits is not checked"
        ));
    }
    let weights = found.bytes + OVERHEAD_BYTES;
    let mut context_tokens = options.context_tokens.unwrap_or(config.context);
    let mut cache_bytes = 1 << 30;
    if let Some(available) = available {
        let room = (available.saturating_sub(weights) / shape.bytes(BLOCK) as u64) as usize * BLOCK;
        if options.context_tokens.is_none() && room < context_tokens && room >= SMALLEST_CONTEXT {
            context_tokens = room;
            said.push(format!(
                "the context is {room} tokens and not the model's {}: more does not fit into the free memory{place} ({})",
                config.context,
                hub::human_bytes(available)
            ));
        }
        let needed = weights + shape.bytes(context_tokens) as u64;
        hub::memory_check(needed, available).map_err(|error| Fault::refused(error.to_string()))?;
        cache_bytes = cache_bytes.min((available - needed) as usize / 2 + shape.bytes(context_tokens) / 2);
    }
    let opened = qwen::Options {
        backend,
        kv_type,
        context_tokens,
        cache_bytes,
        store: store.map(|dir| qwen::Store { dir, bytes_max: STORE_BYTES_MAX }),
        drafts: !options.no_drafts,
        id: found.id.clone(),
        digest: found.digest.clone(),
    };
    let model = Qwen::load(source, &found.path, opened).map_err(Fault::refused)?;
    Ok((model, said))
}

/// What prefixes may take on disk.
const STORE_BYTES_MAX: u64 = 4 << 30;

/// A context below this is of no use to an agent.
const SMALLEST_CONTEXT: usize = 2048;

/// Where the model computes.
fn backend(options: &ModelOptions) -> Result<Backend, Fault> {
    let cpu = || {
        let mut backend = Backend::cpu();
        if let (Backend::Cpu { threads, .. }, Some(asked)) = (&mut backend, options.threads) {
            *threads = asked;
        }
        backend
    };
    let candle = |device: candle_core::Result<candle_core::Device>, name: &str| match device {
        Ok(device) => Ok(Backend::Candle { device, exact: false }),
        Err(error) => Err(Fault::refused(format!(
            "--device {name}: {}; this build {} the feature `{name}`; use --device cpu, or build with --features {name}",
            model::candle_error(&error),
            if (name == "cuda" && cfg!(feature = "cuda")) || (name == "metal" && cfg!(feature = "metal")) {
                "has"
            } else {
                "lacks"
            }
        ))),
    };
    match options.device {
        Device::Cpu => Ok(cpu()),
        Device::Cuda => candle(candle_core::Device::new_cuda(0), "cuda"),
        Device::Metal => candle(candle_core::Device::new_metal(0), "metal"),
        Device::Auto if cfg!(feature = "cuda") => {
            Ok(candle(candle_core::Device::new_cuda(0), "cuda").unwrap_or_else(|_| cpu()))
        }
        Device::Auto if cfg!(feature = "metal") => {
            Ok(candle(candle_core::Device::new_metal(0), "metal").unwrap_or_else(|_| cpu()))
        }
        Device::Auto => Ok(cpu()),
    }
}

/// The template and the tokenizer of a model, without its weights, and how the loop treats it.
pub fn load_template(options: &ModelOptions, stop: &Stop) -> Result<(Template, Habits), Fault> {
    let found = find_model(options, false, stop)?;
    let format = ChatFormat::open(&found.path, None).map_err(Fault::refused)?;
    Ok((format.template, found.habits()))
}
