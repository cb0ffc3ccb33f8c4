//! Vector instructions: registers, the choice among instruction sets, and the loops that several mechanisms share.
//!
//! A loop is an [`Operation`]: a small struct of what it works on, whose `run` is generic over the register
//! ([`Vector`]). [`dispatch`] runs it with the widest registers that the processor has; it is the one place where the
//! processor's abilities are looked at. `LONGSPAN_SIMD=portable|neon|avx2|avx512` forces another instruction set.
//!
//! Loops of one mechanism live in its folder. Here stand those of two or more: [`product`] the matrix product,
//! [`block`] sums and scalings of rows, [`token`] what a step reads from its state; [`rows`] says what a row is.

pub mod block;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
pub mod product;
mod real;
pub mod rows;
pub mod token;
mod vector;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::OnceLock;

pub use real::Real;
pub use vector::{Constants, Vector, ln_1p_unit, sigmoid, silu};

use crate::error::Error;

/// An instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstructionSet {
    /// Whatever the compiler makes of plain loops.
    Portable,
    /// NEON, which every 64-bit Arm processor has.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// AVX2 with fused products.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, DQ, BW and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl InstructionSet {
    /// Those of this processor, the best last.
    pub fn available() -> Vec<Self> {
        let mut sets = vec![Self::Portable];
        #[cfg(target_arch = "aarch64")]
        sets.push(Self::Neon);
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                sets.push(Self::Avx2);
            }
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
            {
                sets.push(Self::Avx512);
            }
        }
        sets
    }

    fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            #[cfg(target_arch = "aarch64")]
            Self::Neon => "neon",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
        }
    }

    /// The one that kernels run with in this process: the best available, or that which `LONGSPAN_SIMD` names.
    ///
    /// # Errors
    /// If the variable names none, or one that this processor lacks.
    #[inline]
    pub fn selected() -> Result<Self, &'static Error> {
        static SELECTED: OnceLock<Result<InstructionSet, Error>> = OnceLock::new();
        SELECTED
            .get_or_init(|| {
                let available = Self::available();
                match std::env::var("LONGSPAN_SIMD") {
                    Err(_) => Ok(available[available.len() - 1]),
                    Ok(name) => {
                        available.iter().copied().find(|set| set.name() == name).ok_or_else(|| Error::UnknownName {
                            kind: "instruction set in LONGSPAN_SIMD",
                            got: name,
                            known: available.iter().map(|set| set.name()).collect::<Vec<_>>().join(", "),
                        })
                    }
                }
            })
            .as_ref()
            .copied()
    }
}

/// The instructions that kernels run with in this process, as `LONGSPAN_SIMD` names them. The same bits come of the same name.
///
/// # Errors
/// If the variable names none, or one that this processor lacks.
pub fn instructions() -> Result<&'static str, Error> {
    InstructionSet::selected().map(InstructionSet::name).map_err(Error::clone)
}

/// A loop over registers.
pub trait Operation: Sized {
    /// The number type.
    type Element: Real;
    /// What it returns.
    type Output;

    /// Runs it with one kind of register. Implementations check every length that they rely on, in release builds too.
    ///
    /// # Safety
    /// The processor must have the instructions of `V`.
    unsafe fn run<V: Vector<Element = Self::Element>>(self) -> Self::Output;
}

/// Declares a struct and implements [`Operation`] for it: `operation!(Name, |field: Type, …| -> Output { body })`. The body is that of
/// [`Operation::run`]; it knows the number type `T` and its register `V`, field types know `T` and `'a`. `operation!(Name, f32, …)` is
/// for one number type alone.
#[macro_export]
macro_rules! operation {
    // Without a result.
    ($name:ident $(, $element:ident)?, |$($field:ident: $type:ty),+| $body:block) => {
        $crate::operation!($name $(, $element)?, |$($field: $type),+| -> () $body);
    };
    // For every number type, or for one.
    ($name:ident, |$($field:ident: $type:ty),+| -> $output:ty $body:block) => {
        #[doc(hidden)]
        pub struct $name<'a, T> {
            $(pub $field: $type,)+
        }

        $crate::operation!(impl [T: $crate::simd::Real] $name<'_, T>, T, |$($field),+| -> $output $body);
    };
    ($name:ident, $element:ident, |$($field:ident: $type:ty),+| -> $output:ty $body:block) => {
        #[doc(hidden)]
        pub struct $name<'a> {
            $(pub $field: $type,)+
        }

        $crate::operation!(impl [] $name<'_>, $element, |$($field),+| -> $output $body);
    };
    (impl [$($generics:tt)*] $name:ty, $element:ident, |$($field:ident),+| -> $output:ty $body:block) => {
        impl<$($generics)*> $crate::simd::Operation for $name {
            type Element = $element;
            type Output = $output;

            // Counted loops over registers unroll; iterators over two arrays at once are not sure to.
            #[allow(clippy::needless_range_loop)]
            #[inline(always)]
            unsafe fn run<V: $crate::simd::Vector<Element = $element>>(self) -> $output {
                let Self { $($field),+ } = self;
                $body
            }
        }
    };
}

pub use crate::operation;

/// The registers of a number type under each instruction set.
pub trait Registers: Constants {
    #[doc(hidden)]
    type Portable: Vector<Element = Self>;
    #[doc(hidden)]
    #[cfg(target_arch = "aarch64")]
    type Neon: Vector<Element = Self>;
    #[doc(hidden)]
    #[cfg(target_arch = "x86_64")]
    type Avx2: Vector<Element = Self>;
    #[doc(hidden)]
    #[cfg(target_arch = "x86_64")]
    type Avx512: Vector<Element = Self>;
}

impl Registers for f32 {
    type Portable = portable::Array<f32>;
    #[cfg(target_arch = "aarch64")]
    type Neon = neon::F32x4;
    #[cfg(target_arch = "x86_64")]
    type Avx2 = x86::F32x8;
    #[cfg(target_arch = "x86_64")]
    type Avx512 = x86::F32x16;
}

impl Registers for f64 {
    type Portable = portable::Array<f64>;
    #[cfg(target_arch = "aarch64")]
    type Neon = neon::F64x2;
    #[cfg(target_arch = "x86_64")]
    type Avx2 = x86::F64x4;
    #[cfg(target_arch = "x86_64")]
    type Avx512 = x86::F64x8;
}

/// Runs an operation with the registers of the selected instruction set.
#[inline]
pub fn dispatch<O: Operation>(operation: O) -> O::Output {
    // `Kernel::check` has reported a bad environment variable before any kernel comes here.
    let set = InstructionSet::selected().unwrap_or(InstructionSet::Portable);
    // SAFETY: only a set that this processor has is selected.
    unsafe { dispatch_to(set, operation) }
}

/// Runs an operation with the registers of an instruction set.
///
/// # Safety
/// The processor must have it.
#[inline]
pub unsafe fn dispatch_to<O: Operation>(set: InstructionSet, operation: O) -> O::Output {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2<O: Operation>(operation: O) -> O::Output {
        // SAFETY: the caller has the instructions.
        unsafe { operation.run::<<O::Element as Registers>::Avx2>() }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
    unsafe fn avx512<O: Operation>(operation: O) -> O::Output {
        // SAFETY: the caller has the instructions.
        unsafe { operation.run::<<O::Element as Registers>::Avx512>() }
    }

    // Not inlined: whatever surrounds the call would hold a copy of the loop.
    #[inline(never)]
    fn baseline<O: Operation, V: Vector<Element = O::Element>>(operation: O) -> O::Output {
        // SAFETY: only called with registers that every processor of the target has.
        unsafe { operation.run::<V>() }
    }

    match set {
        InstructionSet::Portable => baseline::<O, <O::Element as Registers>::Portable>(operation),
        #[cfg(target_arch = "aarch64")]
        InstructionSet::Neon => baseline::<O, <O::Element as Registers>::Neon>(operation),
        // SAFETY: the caller's processor has it.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => unsafe { avx2(operation) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => unsafe { avx512(operation) },
    }
}
