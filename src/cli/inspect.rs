//! `cob tools`, `cob render`, `cob tokenize`: what exactly a model is given.

use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use super::args::ModelOptions;
use super::setup::{self, Fault};
use super::{complain, pretty, show, tool_file};
use crate::agent::{Stop, Toolbox, instruct};
use crate::chat::grammar;
use crate::chat::template::Prompt;
use crate::context;
use crate::hub::Folders;
use crate::message::{Habits, Message, ToolSpec};
use crate::session;
use crate::tools::Tools;

#[derive(Args)]
pub struct ToolsArgs {
    /// Only the tools of a file (OpenAI, bare or MCP shape) [default: the built-in ones]
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// One object: header_tokens, tools[], total_tokens
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: ModelOptions,
}

#[derive(Args)]
pub struct RenderArgs {
    /// The task; `-` reads it from standard input
    #[arg(required_unless_present = "session")]
    task: Option<String>,
    /// The conversation of a session, by its id or a part of it; a task follows it
    #[arg(long, value_name = "ID")]
    session: Option<String>,
    /// The system prompt [default: cob's own with tools, the model's without]
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Whether cob's own system prompt shows the routing line [default: what suits the model]
    #[arg(long, value_name = "BOOL")]
    routing: Option<bool>,
    /// The built-in tools to offer, separated by commas; `none` for none [default: all, or those of the session]
    #[arg(long, value_name = "NAMES")]
    tools: Option<String>,
    /// Offer also the tools of a file
    #[arg(long, value_name = "FILE")]
    tool_file: Option<PathBuf>,
    /// The ids instead of the text
    #[arg(long, conflicts_with = "json")]
    ids: bool,
    /// One object: text, ids, segments[], total_tokens
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: ModelOptions,
}

#[derive(Args)]
pub struct TokenizeArgs {
    /// The text; `-`, or nothing, reads it from standard input
    text: Option<String>,
    /// One object: count, ids, pieces
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: ModelOptions,
}

pub fn tools(args: ToolsArgs) -> u8 {
    show(count_tools(&args))
}

pub fn render(args: RenderArgs) -> u8 {
    show(rendered(&args))
}

pub fn tokenize(args: TokenizeArgs) -> u8 {
    show(tokens(&args))
}

fn count_tools(args: &ToolsArgs) -> Result<String, Fault> {
    let specs = match &args.file {
        Some(file) => tool_file::read(file).map_err(Fault::usage)?,
        None => Tools::builtin(None).map_err(Fault::usage)?.specs(),
    };
    let specs = countable(specs);
    let (template, _) = setup::load_template(&args.model, &Stop::new())?;
    let fault = |error: crate::chat::template::TemplateError| Fault::failed(error.to_string());
    let header = if specs.is_empty() { 0 } else { template.header_tokens().map_err(fault)? };
    let costs: Vec<usize> =
        specs.iter().map(|spec| template.tool_cost(spec)).collect::<Result<_, _>>().map_err(fault)?;
    let total = header + costs.iter().sum::<usize>();
    if args.json {
        let tools = specs
            .iter()
            .zip(&costs)
            .map(|(spec, tokens)| json!({"name": spec.name, "description": spec.description, "tokens": tokens}));
        return Ok(pretty(
            &json!({"header_tokens": header, "tools": tools.collect::<Vec<_>>(), "total_tokens": total}),
        ));
    }
    let mut text = String::new();
    let width = specs.iter().map(|spec| spec.name.chars().count()).max().unwrap_or(0).max(6);
    for (spec, tokens) in specs.iter().zip(&costs) {
        let description = spec.description.lines().next().unwrap_or_default();
        let _ = writeln!(text, "{:width$}  {tokens:>5} tokens  {description}", spec.name);
    }
    let _ = writeln!(text, "{:width$}  {header:>5} tokens  once, for having tools at all", "header");
    let _ = writeln!(text, "{:width$}  {total:>5} tokens", "total");
    Ok(text)
}

/// The tools that a run would offer. Copies of a tool can be counted; what is left out, and copies, are said.
pub fn countable(specs: Vec<ToolSpec>) -> Vec<ToolSpec> {
    if let Some((number, name)) = tool_file::twice(&specs) {
        complain(&format!(
            "tool {number}: there is a tool `{name}` before it; it is counted, but a run refuses the file"
        ));
    }
    let offered = |spec: &ToolSpec| match grammar::check(spec) {
        Ok(()) => true,
        Err(why) => {
            complain(&format!("the tool `{}` is left out here and in a run: {why}", spec.name));
            false
        }
    };
    specs.into_iter().filter(offered).collect()
}

fn rendered(args: &RenderArgs) -> Result<String, Fault> {
    let (mut messages, before) = match &args.session {
        Some(id) => of_session(id)?,
        None => (Vec::new(), None),
    };
    if let Some(text) = &args.system {
        messages.retain(|message| !matches!(message, Message::System { .. }));
        messages.insert(0, Message::System { text: text.clone() });
    }
    if let Some(task) = &args.task {
        messages.push(Message::User { text: given(task)? });
    }
    let tools = match before {
        Some(tools) if args.tools.is_none() && args.tool_file.is_none() => tools,
        _ => offered(args)?,
    };
    let (template, habits) = setup::load_template(&args.model, &Stop::new())?;
    if !messages.iter().any(|message| matches!(message, Message::System { .. }))
        && let (Some(text), _) =
            instruct(None, &tools, Habits { routing: args.routing.unwrap_or(habits.routing), ..habits })
    {
        messages.insert(0, Message::System { text });
    }
    let prompt = template.render(&messages, &tools, true).map_err(|error| Fault::failed(error.to_string()))?;
    Ok(if args.json {
        let segments = prompt
            .segments
            .iter()
            .map(|(name, range)| json!({"name": name, "start": range.start, "end": range.end, "tokens": range.len()}));
        let segments: Vec<_> = segments.collect();
        pretty(&json!({"text": prompt.text, "ids": prompt.ids, "segments": segments, "total_tokens": prompt.ids.len()}))
    } else if args.ids {
        spaced(&prompt.ids)
    } else {
        // Beside the prompt, so that nobody need count, and not in it.
        let _ = std::io::stderr().write_all(sizes(&prompt).as_bytes());
        prompt.text
    })
}

fn sizes(prompt: &Prompt) -> String {
    let mut text = String::from("\n---\n");
    for (name, tokens) in prompt.sizes() {
        let _ = writeln!(text, "{tokens:>6} {name}");
    }
    let _ = writeln!(text, "{:>6} tokens in all", prompt.ids.len());
    text
}

/// The messages of a session, and the tools that it offers.
fn of_session(id: &str) -> Result<(Vec<Message>, Option<Vec<ToolSpec>>), Fault> {
    let dir = Folders::from_env()?.sessions;
    let log = session::read(&session::path(&dir, &session::find(&dir, id)?)?)?;
    let tools = log.run().map(|run| run.tools.clone());
    Ok((context::messages(log.records.iter().map(|record| &record.event)), tools))
}

fn offered(args: &RenderArgs) -> Result<Vec<ToolSpec>, Fault> {
    let (toolbox, left_out) = Toolbox::new(setup::tools(args.tools.as_deref(), args.tool_file.as_deref())?);
    left_out.iter().for_each(|why| complain(why));
    Ok(toolbox.specs().to_vec())
}

fn tokens(args: &TokenizeArgs) -> Result<String, Fault> {
    let text = given(args.text.as_deref().unwrap_or("-"))?;
    let (template, _) = setup::load_template(&args.model, &Stop::new())?;
    let tokenizer = template.tokenizer();
    let ids = tokenizer.encode_text(&text);
    Ok(if args.json {
        let pieces: Vec<String> =
            ids.iter().map(|&id| String::from_utf8_lossy(tokenizer.token_bytes(id)).into()).collect();
        pretty(&json!({"count": ids.len(), "ids": ids, "pieces": pieces}))
    } else {
        spaced(&ids)
    })
}

fn given(text: &str) -> Result<String, Fault> {
    if text != "-" {
        return Ok(text.to_owned());
    }
    let mut read = String::new();
    let result = std::io::stdin().lock().read_to_string(&mut read);
    result.map_err(|error| Fault::usage(format!("cannot read the text from standard input: {error}")))?;
    Ok(read.strip_suffix('\n').map(str::to_owned).unwrap_or(read))
}

fn spaced(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ") + "\n"
}
