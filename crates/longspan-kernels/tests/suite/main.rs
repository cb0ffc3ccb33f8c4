//! Every mechanism held to its definition, under every instruction set of this processor.

mod aft;
mod choice;
mod convolution;
mod feature_maps;
mod fourier;
mod gated;
mod gates;
mod instruction_sets;
mod kernelized;
mod learned_gates;
mod limits;
mod properties;
mod softmax;
mod toeplitz;
mod window;
