//! The integration tests: one binary, a module an area.

mod forward;
mod golden;
mod real;
mod tiny;
