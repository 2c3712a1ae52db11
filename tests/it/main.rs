//! One binary for all integration tests; a module a room.

mod chat;
mod hub;
mod real;
