//! One binary for all integration tests; a module a room.

// Tests start the program itself and the tools of a test server.
#![allow(clippy::disallowed_methods)]

mod agent;
mod bundled;
mod chat;
mod cli;
mod cost;
mod engine;
mod example;
mod forward;
mod golden;
mod hub;
mod readme;
mod real;
mod real_run;
mod store;
mod tidy;
mod tiny;
