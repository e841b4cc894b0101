//! The workers as the router knows them: who is there, how they are, how loaded.

mod booking;
mod breaker;
mod cache_config;
mod computing;
pub mod engine_check;
pub mod engine_load;
pub mod health;
mod info;
mod longest;
pub mod metrics;
pub mod others;
mod pace;
mod patience;
mod phase;
mod pulse;
pub mod registry;
mod rhythm;
pub mod speed;
mod trouble;
pub mod worker;
