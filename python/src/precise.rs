//! What a number type that kernels compute in has in Python.

use std::cell::Cell;

use longspan_kernels::{self as kernels, AnyKernel, Real, Scratch};
use numpy::Element;

use crate::arrays::Precision;
use crate::state::{Numbers, State};

/// A number type of both NumPy and the kernels, with its states and its scratch memory.
pub trait Precise: Real + Element {
    const PRECISION: Precision;
    fn kernel(kernel: &dyn AnyKernel) -> &dyn kernels::Kernel<Self>;
    fn wrap(state: kernels::State<Self>) -> State;
    fn unwrap(state: &State) -> Option<&kernels::State<Self>>;
    fn unwrap_mut(state: &mut State) -> Option<&mut kernels::State<Self>>;
    fn scratch() -> &'static std::thread::LocalKey<Cell<Option<Scratch<Self>>>>;
}

macro_rules! precise {
    ($t:ident, $variant:ident, $scratch:ident) => {
        thread_local! {
            static $scratch: Cell<Option<Scratch<$t>>> = const { Cell::new(None) };
        }

        impl Precise for $t {
            const PRECISION: Precision = Precision::$variant;

            fn kernel(kernel: &dyn AnyKernel) -> &dyn kernels::Kernel<Self> {
                kernel
            }
            fn wrap(state: kernels::State<Self>) -> State {
                State { numbers: Numbers::$variant(state) }
            }
            fn unwrap(state: &State) -> Option<&kernels::State<Self>> {
                if let Numbers::$variant(state) = &state.numbers { Some(state) } else { None }
            }
            fn unwrap_mut(state: &mut State) -> Option<&mut kernels::State<Self>> {
                if let Numbers::$variant(state) = &mut state.numbers { Some(state) } else { None }
            }
            fn scratch() -> &'static std::thread::LocalKey<Cell<Option<Scratch<Self>>>> {
                &$scratch
            }
        }
    };
}
precise!(f32, F32, SCRATCH_F32);
precise!(f64, F64, SCRATCH_F64);
