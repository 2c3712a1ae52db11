//! What a prompt costs: tokens, time, memory.
//!
//! * [`Layout`]: what a prompt is made of; [`Layout::table`] gives every rendered token to one named segment, and to each thing that
//!   can be left out what leaving it out saves.
//! * [`Stopwatch`]: how long the engine reads a prompt: cold, with the prefix in memory, with the prefix on disk.
//! * [`turns`]: the prompts of a session, one for each reply; [`first_break`]: where one does not begin as the one before it did.
//! * [`Skill`]: a `SKILL.md` and what lies beside it.
//! * [`chart`]: times over a number of things, as SVG.

mod breaks;
mod chart;
mod prefill;
mod session;
mod skill;
mod table;

pub use breaks::{Break, first_break};
pub use chart::{Point, chart};
pub use prefill::{Prefill, Stopwatch, Unmeasured};
pub use session::{Turn, turns};
pub use skill::{Reference, SKILL_FILE, Skill, skill_folders};
pub use table::{Item, Layout, Row, Table};
