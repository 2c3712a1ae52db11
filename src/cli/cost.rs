//! `cob cost`: what tools, skills, sessions and texts cost in tokens, in prefill time and in memory.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};

use super::args::ModelOptions;
use super::grid::{Cell, Figures, Format, Grid};
use super::inspect::countable;
use super::interrupts::Interrupts;
use super::setup::{self, Fault};
use super::{complain, print, show, tool_file};
use crate::agent::{Stop, instruct};
use crate::chat::bundled;
use crate::chat::qwen::{ChatFormat, Qwen};
use crate::chat::template::{Prompt, Section, Template, TemplateError};
use crate::hub::{self, Folders};
use crate::measure::{
    Layout, Point, Prefill, Skill, Stopwatch, Table, Turn, Unmeasured, chart, first_break, skill_folders, turns,
};
use crate::message::{Habits, Message, ToolSpec};
use crate::model::Source;
use crate::model::kv::KvShape;
use crate::session;
use crate::tools::Tools;

/// Of a file, its text above this is not counted.
const TEXT_BYTES_MAX: u64 = 64 << 20;
/// Above so many tools the cost of the first, the second and so on is not shown one by one.
const SHOWN_ONE_BY_ONE: usize = 200;

#[derive(Args)]
pub struct CostArgs {
    #[command(subcommand)]
    command: CostCommand,
}

#[derive(Subcommand)]
enum CostCommand {
    /// Tools: those of files (OpenAI, bare or MCP shape), or the built-in ones
    Tools(ToolsCost),
    /// Skills: name and description against the whole file against what it refers to
    Skills(SkillsCost),
    /// A session, turn by turn
    Session(SessionCost),
    /// Text files
    Text(TextCost),
    /// Whether a turn of a session broke the prefix of the one before it; exit code 1 if one did
    Lint(LintCost),
}

#[derive(Args)]
struct Options {
    #[arg(long, value_name = "FORMAT", default_value = "table")]
    format: Format,
    /// Count only: load no model and measure no time
    #[arg(long)]
    no_time: bool,
    /// Over how many turns the cost is added up
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    turns: u32,
    #[command(flatten)]
    model: ModelOptions,
}

#[derive(Args)]
struct ToolsCost {
    /// Tool files [default: the built-in tools]
    files: Vec<PathBuf>,
    /// The built-in tools, before those of the files
    #[arg(long)]
    builtin: bool,
    /// The tools of an MCP server
    #[arg(long, value_name = "NAME")]
    mcp: Option<String>,
    /// What changed between two tool files, and what it costs
    #[arg(long, num_args = 2, value_names = ["BEFORE", "AFTER"], conflicts_with_all = ["files", "builtin", "mcp", "plot"])]
    compare: Option<Vec<PathBuf>>,
    /// The task behind the tools
    #[arg(long, default_value = "Hello")]
    task: String,
    /// The template's own system prompt in place of the one that `cob run` would send
    #[arg(long)]
    plain: bool,
    /// Draw prefill time over the number of tools into an SVG file
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    options: Options,
}

#[derive(Args)]
struct SkillsCost {
    /// Folders of skills, or skills [default: .cob/skills and .claude/skills, here and in the home folder]
    folders: Vec<PathBuf>,
    #[command(flatten)]
    options: Options,
}

#[derive(Args)]
struct SessionCost {
    /// The id of a session, or a part of it
    #[arg(required_unless_present = "compare")]
    id: Option<String>,
    /// What changed between two sessions, turn by turn
    #[arg(long, num_args = 2, value_names = ["BEFORE", "AFTER"], conflicts_with = "id")]
    compare: Option<Vec<String>>,
    #[command(flatten)]
    options: Options,
}

#[derive(Args)]
struct TextCost {
    #[arg(required = true)]
    files: Vec<PathBuf>,
    #[command(flatten)]
    options: Options,
}

#[derive(Args)]
struct LintCost {
    /// The id of a session, or a part of it
    id: String,
    #[command(flatten)]
    options: Options,
}

pub fn run(args: CostArgs) -> u8 {
    let runtime = match super::runtime() {
        Ok(runtime) => runtime,
        Err(fault) => return show(Err(fault)),
    };
    let stop = Interrupts::listen(runtime.handle()).begin();
    let (options, result) = match &args.command {
        CostCommand::Tools(a) => (&a.options, tools(a, &stop)),
        CostCommand::Skills(a) => (&a.options, skills(a, &stop)),
        CostCommand::Session(a) => (&a.options, session(a, &stop)),
        CostCommand::Text(a) => (&a.options, text(a, &stop)),
        CostCommand::Lint(a) => (&a.options, lint(a, &stop)),
    };
    let code = match result {
        Ok((figures, code)) => {
            figures.notes.iter().for_each(|note| complain(note));
            print(&figures.shown(options.format)).max(code)
        }
        Err(fault) => show(Err(fault)),
    };
    runtime.shutdown_background();
    code
}

/// What counts, and what can measure.
struct Counter {
    template: Template,
    habits: Habits,
    /// The model's window, and what a token takes of its KV cache.
    context_tokens: usize,
    kv: Option<KvShape>,
    model: Option<hub::Model>,
    notes: Vec<String>,
}

impl Counter {
    /// With the model that is installed, else with the tokenizer that is built in. Fetches nothing.
    fn new(options: &Options, stop: &Stop) -> Result<Counter, Fault> {
        let Some(found) = setup::installed_model(&options.model, stop)? else {
            return Ok(Counter {
                template: bundled::template().map_err(Fault::failed)?,
                habits: Habits::default(),
                context_tokens: options.model.context_tokens.unwrap_or(bundled::CONTEXT_TOKENS),
                kv: None,
                model: None,
                notes: vec![format!(
                    "counted with {}: no model is here, so no time is measured (`cob model pull` fetches one)",
                    bundled::NAME
                )],
            });
        };
        let format = ChatFormat::open(&found.path, None).map_err(Fault::refused)?;
        let config = Source::open(&found.path).and_then(|source| source.config()).map_err(Fault::refused)?;
        Ok(Counter {
            template: format.template,
            habits: found.habits(),
            context_tokens: options.model.context_tokens.unwrap_or(config.context),
            kv: Some(config.kv_shape(options.model.kv_type.into())),
            notes: vec![format!("counted with the tokenizer of {}", found.id)],
            model: Some(found),
        })
    }

    /// Bytes of KV cache that so many tokens take, their share of the blocks' room.
    fn kv_bytes(&self, tokens: usize) -> Option<usize> {
        self.kv.map(|shape| shape.token_bytes() * tokens)
    }

    fn share(&self, tokens: usize) -> Cell {
        Cell::Percent(tokens as f64 * 100.0 / self.context_tokens.max(1) as f64)
    }

    fn count(&self, text: &str) -> usize {
        self.template.tokenizer().encode_text(text).len()
    }

    /// The model, ready to be measured, where there is one and it is wanted. It keeps prefixes in a folder of its own, which is gone
    /// with it.
    fn watch(&mut self, options: &Options) -> Result<Option<Bench>, Fault> {
        let Some(found) = self.model.as_ref().filter(|_| !options.no_time) else { return Ok(None) };
        let folder = tempfile::tempdir()
            .map_err(|error| Fault::failed(format!("no folder can be made for prefixes on disk: {error}")))?;
        let (qwen, said) = setup::open_qwen(found, &options.model, Some(folder.path().to_owned()))?;
        self.notes.extend(said);
        Ok(Some(Bench { qwen, folder }))
    }
}

struct Bench {
    qwen: Qwen,
    folder: tempfile::TempDir,
}

impl Bench {
    /// `Ok(None)`, with a note, where it cannot be measured.
    fn measure(&self, prompt: &Prompt, stop: &Stop, notes: &mut Vec<String>) -> Result<Option<Prefill>, Fault> {
        match Stopwatch::new(self.qwen.engine(), self.folder.path(), stop.token().clone()).measure(prompt) {
            Ok(prefill) => Ok(Some(prefill)),
            Err(Unmeasured::Cancelled) => {
                Err(stop.reason().map_or_else(|| Fault::failed("the measurement was broken off"), Fault::stopped))
            }
            Err(why @ Unmeasured::Overflow { .. }) => {
                notes.push(why.to_string());
                Ok(None)
            }
            Err(Unmeasured::Failed(why)) => Err(Fault::failed(why)),
        }
    }
}

fn unrendered(error: TemplateError) -> Fault {
    Fault::failed(error.to_string())
}

/// The segments of a prompt: what each has, what leaving it out saves, and what reading it took.
fn segments(counter: &Counter, table: &Table, prefill: Option<&Prefill>) -> Grid {
    let mut grid = Grid::new(
        "segments",
        "Each token belongs to the segment that its first byte is of",
        &["segment", "tokens", "marginal_tokens", "window", "kv_bytes", "cold_ms"],
    );
    let ms = |name: &str| {
        let prefill = prefill?;
        let ranges = table.prompt.segments.iter().filter(|(of, _)| of == name);
        Some(ranges.map(|(_, range)| prefill.cold_ms_at(range.end) - prefill.cold_ms_at(range.start)).sum::<f64>())
    };
    for row in &table.rows {
        grid.row(vec![
            row.name.as_str().into(),
            row.tokens.into(),
            row.marginal_tokens.into(),
            counter.share(row.tokens),
            counter.kv_bytes(row.tokens).into(),
            ms(&row.name).map_or(Cell::None, Cell::Ms),
        ]);
    }
    let total = table.prompt.ids.len();
    grid.row(vec![
        "sum".into(),
        total.into(),
        Cell::None,
        counter.share(total),
        counter.kv_bytes(total).into(),
        prefill.map_or(Cell::None, |prefill| Cell::Ms(prefill.cold_ms)),
    ]);
    grid
}

fn prefill_grid() -> Grid {
    Grid::new(
        "prefill",
        "Reading the prompt: nothing known; all before the task in memory, a new task; the same on disk",
        &["prompt", "tokens", "fresh_tokens", "cold_ms", "cached_ms", "disk_ms", "kv_bytes"],
    )
}

fn prefill_row(grid: &mut Grid, name: &str, prefill: &Prefill) {
    grid.row(vec![
        name.into(),
        prefill.prompt_tokens.into(),
        prefill.fresh_tokens.into(),
        Cell::Ms(prefill.cold_ms),
        Cell::Ms(prefill.cached_ms),
        prefill.disk_ms.map_or(Cell::None, Cell::Ms),
        (prefill.kv_bytes as usize).into(),
    ]);
}

/// What the same prompt costs in each turn and in N of them; what is said in between comes on top in both cases.
fn over_turns(turns: u32, prompt: &Prompt, prefill: Option<&Prefill>) -> Grid {
    let n = turns as usize;
    let (all, fresh) = (prompt.ids.len(), prompt.ids.len() - prompt.pinned);
    let mut grid = Grid::new(
        "turns",
        format!("The same prompt in each of {n} turns, a new task each time"),
        &["cache", "tokens_a_turn", "tokens", "ms_a_turn", "ms"],
    );
    let cold = prefill.map(|prefill| prefill.cold_ms);
    let cached = prefill.map(|prefill| prefill.cached_ms);
    let ms = |ms: Option<f64>| ms.map_or(Cell::None, Cell::Ms);
    grid.row(vec!["without".into(), all.into(), (all * n).into(), ms(cold), ms(cold.map(|ms| ms * n as f64))]);
    let with = cold.zip(cached).map(|(cold, cached)| cold + cached * (n - 1) as f64);
    grid.row(vec!["with".into(), fresh.into(), (all + fresh * (n - 1)).into(), ms(cached), ms(with)]);
    grid
}

fn tools(args: &ToolsCost, stop: &Stop) -> Result<(Figures, u8), Fault> {
    let mut counter = Counter::new(&args.options, stop)?;
    if let Some(files) = &args.compare {
        return compare_tools(&counter, &files[0], &files[1], args.options.turns);
    }
    if let Some(name) = &args.mcp {
        return Err(Fault::usage(format!(
            "--mcp {name}: no MCP server is configured under that name, for this version has no MCP client; save the server's \
             answer to tools/list into a file and give that file"
        )));
    }
    let builtin = args.builtin || args.files.is_empty();
    let mut specs = if builtin { Tools::builtin(None).map_err(Fault::usage)?.specs() } else { Vec::new() };
    for file in &args.files {
        specs.extend(tool_file::read(file).map_err(Fault::usage)?);
    }
    let specs = countable(specs);
    if specs.is_empty() {
        counter.notes.push("there is no tool: what is left is the prompt without tools".into());
    }
    let task = Message::User { text: args.task.clone() };
    let layout = |tools: &[ToolSpec], counter: &Counter| Layout {
        sections: match if args.plain { None } else { instruct(None, tools, counter.habits).0 } {
            Some(text) => vec![Section { name: "system".into(), text }],
            None => Vec::new(),
        },
        messages: vec![task.clone()],
        tools: tools.to_vec(),
    };
    let table = layout(&specs, &counter).table(&counter.template).map_err(unrendered)?;
    if table.is_too_long {
        counter.notes.push("the marginal costs are left out: so much would take too long".into());
    }
    let mut first = Grid::new("nth", "The first tool, the second, …", &["tool", "prompt_tokens", "added_tokens"]);
    if specs.len() <= SHOWN_ONE_BY_ONE && !table.is_too_long {
        // With the prompt of all of them, so that only the tools change.
        let mut whole = layout(&specs, &counter);
        whole.tools.clear();
        let mut before = whole.tokens(&counter.template).map_err(unrendered)?;
        first.row(vec!["none".into(), before.into(), Cell::None]);
        for spec in &specs {
            whole.tools.push(spec.clone());
            let now = whole.tokens(&counter.template).map_err(unrendered)?;
            first.row(vec![spec.name.as_str().into(), now.into(), (now as i64 - before as i64).into()]);
            before = now;
        }
    } else {
        counter.notes.push(format!("more than {SHOWN_ONE_BY_ONE} tools: the cost of each further one is left out"));
    }
    let bench = counter.watch(&args.options)?;
    let mut notes = std::mem::take(&mut counter.notes);
    let prefill = match &bench {
        Some(bench) => bench.measure(&table.prompt, stop, &mut notes)?,
        None => None,
    };
    let mut reading = prefill_grid();
    let named = |count: usize| if count == 1 { "1 tool".to_owned() } else { format!("{count} tools") };
    if let Some(path) = &args.plot {
        let Some(bench) = &bench else {
            return Err(Fault::usage("--plot draws what was measured, and there is no model, or --no-time was given"));
        };
        let mut points = Vec::new();
        let counts: BTreeSet<usize> =
            [0, 1, 2, 5, 10, 20, 50, 100, 200].into_iter().chain([specs.len()]).filter(|&n| n <= specs.len()).collect();
        for count in counts {
            let measured = match &prefill {
                Some(prefill) if count == specs.len() => Some(prefill.clone()),
                _ => {
                    let prompt = layout(&specs[..count], &counter).render(&counter.template).map_err(unrendered)?;
                    bench.measure(&prompt, stop, &mut notes)?
                }
            };
            let Some(measured) = measured else { break };
            if count != specs.len() {
                prefill_row(&mut reading, &named(count), &measured);
            }
            let Prefill { cold_ms, cached_ms, disk_ms, .. } = measured;
            points.push(Point { things: count, cold_ms, cached_ms, disk_ms });
        }
        let svg = chart("Reading a prompt with tools", "tools in the prompt", &points).map_err(Fault::failed)?;
        std::fs::write(path, svg)
            .map_err(|error| Fault::failed(format!("the chart cannot be written to {}: {error}", path.display())))?;
        notes.push(format!("the chart is in {}", path.display()));
    }
    if let Some(prefill) = &prefill {
        prefill_row(&mut reading, &named(specs.len()), prefill);
    }
    let grids = vec![
        segments(&counter, &table, prefill.as_ref()),
        first,
        reading,
        over_turns(args.options.turns, &table.prompt, prefill.as_ref()),
    ];
    Ok((Figures { notes, grids }, 0))
}

fn compare_tools(counter: &Counter, before: &Path, after: &Path, turns: u32) -> Result<(Figures, u8), Fault> {
    let [before, after] = [before, after].map(|file| tool_file::read(file).map(countable));
    let (before, after) = (before.map_err(Fault::usage)?, after.map_err(Fault::usage)?);
    let mut grid =
        Grid::new("changes", "What changed", &["tool", "change", "before_tokens", "after_tokens", "change_tokens"]);
    let cost = |spec: &ToolSpec| counter.template.tool_cost(spec).map_err(unrendered);
    let header = |tools: &[ToolSpec]| match tools.is_empty() {
        true => Ok(0),
        false => counter.template.header_tokens().map_err(unrendered),
    };
    let mut totals = [header(&before)?, header(&after)?];
    if totals[0] != totals[1] {
        let change = totals[1] as i64 - totals[0] as i64;
        grid.row(vec!["header".into(), "".into(), totals[0].into(), totals[1].into(), change.into()]);
    }
    // The n-th of a name is compared with the n-th of that name.
    let nth = |specs: &[ToolSpec], at: usize| specs[..at].iter().filter(|spec| spec.name == specs[at].name).count();
    let find = |specs: &[ToolSpec], name: &str, n: usize| {
        specs.iter().enumerate().filter(|(_, spec)| spec.name == name).nth(n).map(|(at, _)| at)
    };
    let mut kept: Vec<(usize, usize)> = Vec::new();
    for (at, spec) in before.iter().enumerate() {
        let tokens = cost(spec)?;
        totals[0] += tokens;
        let Some(place) = find(&after, &spec.name, nth(&before, at)) else {
            grid.row(vec![
                spec.name.as_str().into(),
                "removed".into(),
                tokens.into(),
                Cell::None,
                (-(tokens as i64)).into(),
            ]);
            continue;
        };
        kept.push((at, place));
        let now = cost(&after[place])?;
        if after[place] != *spec {
            let change = now as i64 - tokens as i64;
            grid.row(vec![spec.name.as_str().into(), "changed".into(), tokens.into(), now.into(), change.into()]);
        }
    }
    for (at, spec) in after.iter().enumerate() {
        let tokens = cost(spec)?;
        totals[1] += tokens;
        if find(&before, &spec.name, nth(&after, at)).is_none() {
            grid.row(vec![spec.name.as_str().into(), "added".into(), Cell::None, tokens.into(), tokens.into()]);
        }
    }
    if !kept.is_sorted_by_key(|(_, place)| place) {
        grid.row(vec!["all".into(), "reordered".into(), Cell::None, Cell::None, 0usize.into()]);
    }
    if grid.rows.is_empty() {
        grid.row(vec!["all".into(), "none".into(), totals[0].into(), totals[1].into(), 0usize.into()]);
    }
    let change = totals[1] as i64 - totals[0] as i64;
    let mut sums = Grid::new("sums", "What it costs", &["what", "before_tokens", "after_tokens", "change_tokens"]);
    let mut row = |what: String, n: i64| {
        let [before, after] = totals.map(|tokens| Cell::Count(tokens as i64 * n));
        sums.row(vec![what.into(), before, after, (change * n).into()]);
    };
    row("each turn without the cache".into(), 1);
    row(format!("{turns} turns without the cache"), i64::from(turns));
    row(format!("{turns} turns with the cache: read once"), 1);
    Ok((Figures { notes: counter.notes.clone(), grids: vec![grid, sums] }, 0))
}

fn skills(args: &SkillsCost, stop: &Stop) -> Result<(Figures, u8), Fault> {
    let given = !args.folders.is_empty();
    let folders = if given { args.folders.clone() } else { skill_places() };
    let mut counter = Counter::new(&args.options, stop)?;
    let (mut found, mut bad): (Vec<Skill>, usize) = (Vec::new(), 0);
    for folder in &folders {
        match skill_folders(folder) {
            Ok(all) => {
                for folder in all {
                    match Skill::read(&folder) {
                        Ok(skill) => found.push(skill),
                        Err(why) => {
                            bad += 1;
                            counter.notes.push(format!("skipped: {why}"));
                        }
                    }
                }
            }
            Err(why) if given => {
                bad += 1;
                counter.notes.push(format!("skipped: {why}"));
            }
            Err(_) => {}
        }
    }
    if found.is_empty() {
        let looked: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
        counter.notes.drain(..).for_each(|note| complain(&note));
        return Err(Fault::usage(format!("there is no skill in {}; give a folder that holds some", looked.join(", "))));
    }
    let lines: Vec<String> = found.iter().map(Skill::line).collect();
    let list = |n: usize| lines[..n].iter().map(|line| format!("{line}\n")).collect::<String>();
    let mut grid = Grid::new(
        "skills",
        "Name and description are there always, the file when the skill is used, the rest when it is read",
        &["skill", "label_tokens", "line_tokens", "file_tokens", "references_tokens", "window", "kv_bytes"],
    );
    let mut references = Grid::new("references", "What a skill refers to", &["skill", "file", "tokens"]);
    let mut sums = [0; 4];
    for skill in &found {
        let mut of_references = 0;
        for reference in &skill.references {
            let tokens = match &reference.text {
                Ok(text) => Some(counter.count(text)),
                Err(why) => {
                    counter.notes.push(format!("{}: {} is not counted: {why}", skill.name, reference.path.display()));
                    None
                }
            };
            of_references += tokens.unwrap_or(0);
            references.row(vec![
                skill.name.as_str().into(),
                reference.path.display().to_string().into(),
                tokens.into(),
            ]);
        }
        let line = counter.count(&skill.line());
        let counts = [counter.count(&skill.label()), line, counter.count(&skill.text), of_references];
        sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        let mut row: Vec<Cell> = vec![skill.name.as_str().into()];
        row.extend(counts.map(Cell::from));
        row.extend([counter.share(line), counter.kv_bytes(line).into()]);
        grid.row(row);
    }
    if found.len() > 1 {
        let mut row: Vec<Cell> = vec!["sum".into()];
        row.extend(sums.map(Cell::from));
        row.extend([counter.share(sums[1]), counter.kv_bytes(sums[1]).into()]);
        grid.row(row);
    }
    let mut nth =
        Grid::new("nth", "The first line of the list, the second, …", &["skill", "list_tokens", "added_tokens"]);
    let mut before = 0;
    for (n, skill) in found.iter().enumerate() {
        let now = counter.count(&list(n + 1));
        nth.row(vec![skill.name.as_str().into(), now.into(), (now - before).into()]);
        before = now;
    }
    // Three prompts: the list; with the files; with all that they refer to.
    let base = "You can load these skills:\n".to_owned();
    let files: String = found.iter().map(|skill| format!("\n{}", skill.text)).collect();
    let read: String = found
        .iter()
        .flat_map(|skill| &skill.references)
        .filter_map(|reference| reference.text.as_ref().ok())
        .map(|text| format!("\n{text}"))
        .collect();
    let all = list(found.len());
    let mut reading = prefill_grid();
    let mut notes = Vec::new();
    let render = |system: String| {
        let layout = Layout {
            sections: vec![Section { name: "skills".into(), text: system }],
            messages: vec![Message::User { text: "Hello".into() }],
            tools: Vec::new(),
        };
        layout.render(&counter.template).map_err(unrendered)
    };
    let prompts = [
        ("no skill", render(base.clone())?),
        ("list", render(format!("{base}{all}"))?),
        ("list and files", render(format!("{base}{all}{files}"))?),
        ("list, files and references", render(format!("{base}{all}{files}{read}"))?),
    ];
    let bench = counter.watch(&args.options)?;
    let mut of_list = None;
    if let Some(bench) = &bench {
        for (name, prompt) in &prompts {
            if let Some(prefill) = bench.measure(prompt, stop, &mut notes)? {
                prefill_row(&mut reading, name, &prefill);
                if *name == "list" {
                    of_list = Some(prefill);
                }
            }
        }
    }
    let turns = over_turns(args.options.turns, &prompts[1].1, of_list.as_ref());
    let mut all_notes = counter.notes.clone();
    all_notes.extend(notes);
    let code = u8::from(given && bad > 0);
    Ok((Figures { notes: all_notes, grids: vec![grid, references, nth, reading, turns] }, code))
}

/// Where skills lie by convention.
fn skill_places() -> Vec<PathBuf> {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let roots = [Some(PathBuf::from(".")), home];
    roots
        .into_iter()
        .flatten()
        .flat_map(|root| [".cob/skills", ".claude/skills"].map(|below| root.join(below)))
        .collect()
}

/// A session's replies.
fn read_turns(text: &str) -> Result<(String, Vec<Turn>), Fault> {
    let dir = Folders::from_env()?.sessions;
    let id = session::find(&dir, text)?;
    let log = session::read(&session::path(&dir, &id)?)?;
    let events: Vec<&session::Event> = log.records.iter().map(|record| &record.event).collect();
    Ok((id, turns(&events)))
}

/// The prompts of a session's turns. What does not agree with what was logged is said.
fn prompts(counter: &mut Counter, turns: &[Turn]) -> Result<(Vec<Prompt>, bool), Fault> {
    let mut agree = true;
    let ours = counter.model.as_ref().map(|model| model.digest.as_str());
    if let Some(turn) = turns.iter().find(|turn| Some(turn.model.digest.as_str()) != ours) {
        let here = counter.model.as_ref().map_or(bundled::NAME, |model| model.id.as_str());
        let note =
            format!("turn {} ran on {}, and {here} counts here; --model names another", turn.number, turn.model.id);
        counter.notes.push(note);
    }
    let mut prompts = Vec::new();
    for turn in turns {
        let prompt = turn.layout.render(&counter.template).map_err(unrendered)?;
        if prompt.ids.len() != turn.usage.prompt_tokens {
            agree = false;
            counter.notes.push(format!(
                "turn {}: its segments sum to {} tokens, and the session logged {}: another model, tokenizer or template",
                turn.number,
                prompt.ids.len(),
                turn.usage.prompt_tokens
            ));
        }
        prompts.push(prompt);
    }
    Ok((prompts, agree))
}

fn session(args: &SessionCost, stop: &Stop) -> Result<(Figures, u8), Fault> {
    let mut counter = Counter::new(&args.options, stop)?;
    if let Some(ids) = &args.compare {
        return compare_sessions(counter, &ids[0], &ids[1]);
    }
    let (id, turns) = read_turns(args.id.as_deref().unwrap_or_default())?;
    if turns.is_empty() {
        return Err(Fault::refused(format!("session {id} has no reply yet, so there is nothing to count")));
    }
    let (prompts, agree) = prompts(&mut counter, &turns)?;
    let mut grid = Grid::new(
        "turns",
        format!("Session {id}: each reply, and what was read for it"),
        &[
            "turn",
            "reply",
            "prompt_tokens",
            "logged_tokens",
            "cached_tokens",
            "disk_tokens",
            "prefilled_tokens",
            "output_tokens",
            "prefill_ms",
        ],
    );
    let mut sums = [0usize; 6];
    let mut ms = 0.0;
    for (turn, prompt) in turns.iter().zip(&prompts) {
        let usage = &turn.usage;
        let counts = [
            prompt.ids.len(),
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.restored_tokens,
            usage.prefilled_tokens,
            usage.forced_tokens + usage.sampled_tokens,
        ];
        sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        ms += usage.prefill_ms;
        let mut row: Vec<Cell> =
            vec![turn.number.into(), if turn.is_thrown_away { "thrown away" } else { "kept" }.into()];
        row.extend(counts.map(Cell::from));
        row.push(Cell::Ms(usage.prefill_ms));
        grid.row(row);
    }
    let mut row: Vec<Cell> = vec![Cell::None, "sum".into()];
    row.extend(sums.map(Cell::from));
    row.push(Cell::Ms(ms));
    grid.row(row);
    let mut cost = Grid::new("cache", "What the cache saved", &["cache", "tokens", "ms"]);
    let rate = if sums[4] > 0 { ms / sums[4] as f64 } else { 0.0 };
    cost.row(vec!["without (its time at the same rate)".into(), sums[1].into(), Cell::Ms(rate * sums[1] as f64)]);
    cost.row(vec!["with".into(), sums[4].into(), Cell::Ms(ms)]);
    let (last, last_prompt) = (turns.len() - 1, &prompts[prompts.len() - 1]);
    let table = turns[last].layout.table(&counter.template).map_err(unrendered)?;
    let bench = counter.watch(&args.options)?;
    let mut notes = std::mem::take(&mut counter.notes);
    let prefill = match &bench {
        Some(bench) => bench.measure(last_prompt, stop, &mut notes)?,
        None => None,
    };
    let mut reading = prefill_grid();
    if let Some(prefill) = &prefill {
        prefill_row(&mut reading, &format!("turn {}, read now", turns[last].number), prefill);
    }
    let mut segments = segments(&counter, &table, prefill.as_ref());
    segments.title = format!("The prompt of turn {}", turns[last].number);
    let over = over_turns(args.options.turns, last_prompt, prefill.as_ref());
    let over = Grid { name: "more_turns", title: format!("{} more turns like the last", args.options.turns), ..over };
    Ok((Figures { notes, grids: vec![grid, cost, segments, reading, over] }, u8::from(!agree)))
}

fn compare_sessions(mut counter: Counter, before: &str, after: &str) -> Result<(Figures, u8), Fault> {
    let [before, after] = [read_turns(before)?, read_turns(after)?];
    let (first, agree) = prompts(&mut counter, &before.1)?;
    let (second, agree_too) = prompts(&mut counter, &after.1)?;
    let mut grid = Grid::new(
        "turns",
        format!("{} against {}", before.0, after.0),
        &[
            "turn",
            "before_prompt_tokens",
            "after_prompt_tokens",
            "change_tokens",
            "before_prefilled_tokens",
            "after_prefilled_tokens",
        ],
    );
    let mut sums = [0i64; 4];
    for at in 0..first.len().max(second.len()) {
        let tokens = |prompts: &[Prompt]| prompts.get(at).map(|prompt| prompt.ids.len());
        let read = |turns: &[Turn]| turns.get(at).map(|turn| turn.usage.prefilled_tokens);
        let counts = [tokens(&first), tokens(&second), read(&before.1), read(&after.1)];
        sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count.unwrap_or(0) as i64);
        let change = counts[1].unwrap_or(0) as i64 - counts[0].unwrap_or(0) as i64;
        grid.row(vec![
            (at + 1).into(),
            counts[0].into(),
            counts[1].into(),
            change.into(),
            counts[2].into(),
            counts[3].into(),
        ]);
    }
    grid.row(vec![
        Cell::None,
        sums[0].into(),
        sums[1].into(),
        (sums[1] - sums[0]).into(),
        sums[2].into(),
        sums[3].into(),
    ]);
    // Which segments differ in the first turn: there both begin from nothing.
    let mut changes = Grid::new(
        "changes",
        "What changed in the last turn of each, by segment",
        &["segment", "before_tokens", "after_tokens", "change_tokens"],
    );
    if let (Some(first), Some(second)) = (first.last(), second.last()) {
        let (old, new) = (first.sizes(), second.sizes());
        let names: Vec<&String> = old.iter().map(|(name, _)| name).collect();
        let added = new.iter().map(|(name, _)| name).filter(|name| !names.contains(name));
        for name in names.iter().copied().chain(added) {
            let of = |sizes: &[(String, usize)]| sizes.iter().find(|(n, _)| n == name).map(|(_, tokens)| *tokens);
            let (before, after) = (of(&old), of(&new));
            if before != after {
                let change = after.unwrap_or(0) as i64 - before.unwrap_or(0) as i64;
                changes.row(vec![name.as_str().into(), before.into(), after.into(), change.into()]);
            }
        }
    }
    Ok((Figures { notes: counter.notes, grids: vec![grid, changes] }, u8::from(!(agree && agree_too))))
}

fn lint(args: &LintCost, stop: &Stop) -> Result<(Figures, u8), Fault> {
    let mut counter = Counter::new(&args.options, stop)?;
    let (id, turns) = read_turns(&args.id)?;
    let (prompts, _) = prompts(&mut counter, &turns)?;
    let mut grid = Grid::new(
        "breaks",
        format!("Session {id}: where a prompt does not begin as the one before it"),
        &["turn", "common_tokens", "lost_tokens", "segment_before", "text_before", "segment_after", "text_after"],
    );
    for (at, pair) in prompts.windows(2).enumerate() {
        if let Some(found) = first_break(&pair[0], &pair[1], counter.template.tokenizer()) {
            grid.row(vec![
                turns[at + 1].number.into(),
                found.common_tokens.into(),
                found.lost_tokens.into(),
                found.before.segment.into(),
                found.before.text.into(),
                found.after.segment.into(),
                found.after.text.into(),
            ]);
        }
    }
    let code = u8::from(!grid.rows.is_empty());
    counter.notes.push(match grid.rows.len() {
        0 => format!("{} turns, and each goes on where the one before it ended", turns.len()),
        n => format!("{n} of {} turns broke the prefix; what changes belongs at the end of a prompt", turns.len()),
    });
    Ok((Figures { notes: counter.notes, grids: vec![grid] }, code))
}

fn text(args: &TextCost, stop: &Stop) -> Result<(Figures, u8), Fault> {
    let mut counter = Counter::new(&args.options, stop)?;
    let mut texts: Vec<(String, String)> = Vec::new();
    let mut bad = 0;
    for file in &args.files {
        match read_text(file) {
            Ok(text) => texts.push((file.display().to_string(), text)),
            Err(why) => {
                bad += 1;
                counter.notes.push(format!("skipped: {}: {why}", file.display()));
            }
        }
    }
    if texts.is_empty() {
        counter.notes.drain(..).for_each(|note| complain(&note));
        return Err(Fault::usage("no file could be read, so there is nothing to count"));
    }
    let mut grid = Grid::new(
        "texts",
        "Text as it would stand in a message",
        &["file", "bytes", "characters", "tokens", "window", "kv_bytes", "tokens_in_turns"],
    );
    let mut sum = 0;
    for (name, text) in &texts {
        let tokens = counter.count(text);
        sum += tokens;
        grid.row(vec![
            name.as_str().into(),
            text.len().into(),
            text.chars().count().into(),
            tokens.into(),
            counter.share(tokens),
            counter.kv_bytes(tokens).into(),
            (tokens * args.options.turns as usize).into(),
        ]);
    }
    if texts.len() > 1 {
        grid.row(vec![
            "sum".into(),
            texts.iter().map(|(_, text)| text.len()).sum::<usize>().into(),
            texts.iter().map(|(_, text)| text.chars().count()).sum::<usize>().into(),
            sum.into(),
            counter.share(sum),
            counter.kv_bytes(sum).into(),
            (sum * args.options.turns as usize).into(),
        ]);
    }
    let bench = counter.watch(&args.options)?;
    let mut notes = std::mem::take(&mut counter.notes);
    let mut reading = prefill_grid();
    if let Some(bench) = &bench {
        for (name, text) in &texts {
            // In the system turn, which is what is kept.
            let layout = Layout {
                sections: vec![Section { name: "text".into(), text: text.clone() }],
                messages: vec![Message::User { text: "Hello".into() }],
                tools: Vec::new(),
            };
            let prompt = layout.render(&counter.template).map_err(unrendered)?;
            if let Some(prefill) = bench.measure(&prompt, stop, &mut notes)? {
                prefill_row(&mut reading, name, &prefill);
            }
        }
    }
    Ok((Figures { notes, grids: vec![grid, reading] }, u8::from(bad > 0)))
}

fn read_text(path: &Path) -> Result<String, String> {
    use std::io::Read;
    let unreadable = |error: std::io::Error| format!("it cannot be read: {error}");
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(unreadable)?;
    file.take(TEXT_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > TEXT_BYTES_MAX {
        return Err(format!("it has more than {} MiB", TEXT_BYTES_MAX >> 20));
    }
    String::from_utf8(bytes).map_err(|_| "it is not text (UTF-8)".to_owned())
}
