//! The front end: the one room that prints.

pub mod model;
pub mod progress;
pub mod signals;
