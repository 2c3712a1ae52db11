//! Tables of figures: for people, for programs, for documents.

use std::fmt::Write;

use clap::ValueEnum;
use serde_json::{Map, Value, json};
use unicode_width::UnicodeWidthStr;

use super::output::printable;
use super::pretty;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Columns for people
    Table,
    /// One object on standard output: notes, and each table as a list of objects
    Json,
    /// Each table under its name, an empty line between them
    Csv,
    /// Markdown
    Md,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    Text(String),
    Count(i64),
    Ms(f64),
    Percent(f64),
    /// Not known, or without meaning here.
    None,
}

impl From<&str> for Cell {
    fn from(text: &str) -> Cell {
        Cell::Text(text.to_owned())
    }
}
impl From<String> for Cell {
    fn from(text: String) -> Cell {
        Cell::Text(text)
    }
}
impl From<usize> for Cell {
    fn from(count: usize) -> Cell {
        Cell::Count(count as i64)
    }
}
impl From<i64> for Cell {
    fn from(count: i64) -> Cell {
        Cell::Count(count)
    }
}
impl<T: Into<Cell>> From<Option<T>> for Cell {
    fn from(value: Option<T>) -> Cell {
        value.map_or(Cell::None, Into::into)
    }
}

/// One table. The keys of the columns are those of JSON and CSV, and the heads of people's tables with blanks for underscores.
pub struct Grid {
    pub name: &'static str,
    pub title: String,
    pub keys: Vec<&'static str>,
    pub rows: Vec<Vec<Cell>>,
}

impl Grid {
    pub fn new(name: &'static str, title: impl Into<String>, keys: &[&'static str]) -> Grid {
        Grid { name, title: title.into(), keys: keys.to_vec(), rows: Vec::new() }
    }

    pub fn row(&mut self, cells: Vec<Cell>) {
        debug_assert_eq!(cells.len(), self.keys.len());
        self.rows.push(cells);
    }
}

/// Tables and what must be said with them.
#[derive(Default)]
pub struct Figures {
    pub notes: Vec<String>,
    pub grids: Vec<Grid>,
}

impl Figures {
    pub fn shown(&self, format: Format) -> String {
        match format {
            Format::Json => self.json(),
            Format::Csv => self.each(csv),
            Format::Md => self.each(markdown),
            Format::Table => self.each(columns),
        }
    }

    fn each(&self, one: fn(&Grid) -> String) -> String {
        let grids: Vec<String> = self.grids.iter().filter(|grid| !grid.rows.is_empty()).map(one).collect();
        grids.join("\n")
    }

    fn json(&self) -> String {
        let mut object = Map::new();
        object.insert("notes".into(), json!(self.notes));
        for grid in &self.grids {
            let row = |cells: &Vec<Cell>| -> Value {
                let fields = grid.keys.iter().zip(cells).map(|(key, cell)| ((*key).to_owned(), value(cell)));
                Value::Object(fields.collect())
            };
            object.insert(grid.name.into(), grid.rows.iter().map(row).collect());
        }
        pretty(&Value::Object(object))
    }
}

fn value(cell: &Cell) -> Value {
    let rounded = |x: f64| json!((x * 1000.0).round() / 1000.0);
    match cell {
        Cell::Text(text) => json!(text),
        Cell::Count(count) => json!(count),
        Cell::Ms(x) | Cell::Percent(x) => rounded(*x),
        Cell::None => Value::Null,
    }
}

fn plain(cell: &Cell) -> String {
    match cell {
        Cell::Text(text) => printable(text),
        Cell::Count(count) => grouped(*count),
        Cell::Ms(ms) if *ms < 10.0 => format!("{ms:.1}"),
        Cell::Ms(ms) => grouped(ms.round() as i64),
        Cell::Percent(percent) => format!("{percent:.1} %"),
        Cell::None => "–".into(),
    }
}

/// With commas between thousands.
fn grouped(count: i64) -> String {
    let digits = count.unsigned_abs().to_string();
    let mut text = if count < 0 { "-".to_owned() } else { String::new() };
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn head(key: &str) -> String {
    key.replace('_', " ")
}

fn is_text(grid: &Grid, column: usize) -> bool {
    grid.rows.iter().any(|row| matches!(row[column], Cell::Text(_)))
}

fn columns(grid: &Grid) -> String {
    let heads: Vec<String> = grid.keys.iter().map(|key| head(key)).collect();
    let rows: Vec<Vec<String>> = grid.rows.iter().map(|row| row.iter().map(plain).collect()).collect();
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].width());
        cells.chain([heads[column].width()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let mut text = format!("{}\n", grid.title);
    for row in std::iter::once(&heads).chain(&rows) {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let blanks = " ".repeat(widths[column] - cell.width());
            let gap = if column > 0 { "  " } else { "" };
            let _ = match is_text(grid, column) {
                true => write!(line, "{gap}{cell}{blanks}"),
                false => write!(line, "{gap}{blanks}{cell}"),
            };
        }
        let _ = writeln!(text, "  {}", line.trim_end());
    }
    text
}

fn markdown(grid: &Grid) -> String {
    let escaped = |text: String| text.replace('|', "\\|").replace('\n', " ");
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let mut text = format!("{}\n\n", grid.title);
    text += &line(grid.keys.iter().map(|key| head(key)).collect());
    text += &line((0..grid.keys.len()).map(|c| if is_text(grid, c) { "---".into() } else { "---:".into() }).collect());
    for row in &grid.rows {
        text += &line(row.iter().map(|cell| escaped(plain(cell))).collect());
    }
    text
}

fn csv(grid: &Grid) -> String {
    let quoted = |text: &str| match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    };
    let field = |cell: &Cell| match value(cell) {
        Value::Null => String::new(),
        Value::String(text) => quoted(&text),
        number => number.to_string(),
    };
    let mut text = format!("# {}\n{}\n", grid.name, grid.keys.join(","));
    for row in &grid.rows {
        let _ = writeln!(text, "{}", row.iter().map(field).collect::<Vec<_>>().join(","));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_the_same_in_every_format() {
        let mut grid = Grid::new("tools", "What each tool costs", &["tool", "tokens", "cold_ms", "share"]);
        grid.row(vec!["tìm_kiếm".into(), 1234usize.into(), Cell::Ms(1.25), Cell::Percent(3.77)]);
        grid.row(vec!["a,\"b\" | 天気".into(), (-5i64).into(), Cell::Ms(12_345.4), Cell::None]);
        let figures = Figures { notes: vec!["said".into()], grids: vec![grid] };
        insta::assert_snapshot!(
            [Format::Table, Format::Json, Format::Csv, Format::Md]
                .map(|format| figures.shown(format))
                .join("\n=====\n")
        );
    }
}
