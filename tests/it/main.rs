//! One binary for all integration tests; a module a room.

mod chat;
mod forward;
mod golden;
mod real;
mod tiny;
