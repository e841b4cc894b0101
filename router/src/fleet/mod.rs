//! The workers as the router knows them: who is there, where, how they are, how loaded.

pub mod health;
pub mod registry;
pub mod worker;
pub mod worker_id;
pub mod worker_url;
