//! One binary for all integration tests; a module a room.

mod agent;
mod chat;
mod cli;
mod hub;
mod real;
