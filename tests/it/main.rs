//! The one binary of integration tests; one module a subject.

mod hub;
