//! The integration tests: one binary, a module an area.

mod golden;
mod real;
