//! One binary for all integration tests; a module a room.

mod agent;
mod chat;
mod cli;
mod forward;
mod golden;
mod hub;
mod real;
mod tidy;
mod tiny;
