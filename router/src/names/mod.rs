//! What workers and models are called.

mod model_name;
mod worker_id;
mod worker_url;

pub use model_name::ModelName;
pub use worker_id::WorkerId;
pub use worker_url::WorkerUrl;
