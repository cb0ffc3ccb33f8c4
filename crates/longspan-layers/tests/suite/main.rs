//! Every layer held to its definition in f64.

mod blocks;
mod layers;
