# ruff: noqa: E501
"""Kernels in Triton's own representation, as Triton 3.9 made it of the functions in the comments.

Of one with its locations, of the others without.
"""

# @triton.jit
# def turn(x, cos, out, n, INPLACE: tl.constexpr):
#     at = tl.program_id(0) * 16 + tl.arange(0, 16)
#     v = tl.load(x + at, mask=at < n) * tl.load(cos + at, mask=at < n)
#     tl.store((x if INPLACE else out) + at, v, mask=at < n)
# INPLACE=True
TURN_IN_PLACE = r"""
#loc = loc("kernels.py":5:1)
#loc9 = loc("x"(#loc))
#loc10 = loc("cos"(#loc))
#loc11 = loc("out"(#loc))
#loc12 = loc("n"(#loc))
module {
  tt.func public @turn(%x: !tt.ptr<f32> loc("x"(#loc)), %cos: !tt.ptr<f32> loc("cos"(#loc)), %out: !tt.ptr<f32> loc("out"(#loc)), %n: i32 loc("n"(#loc))) attributes {noinline = false} {
    %at = arith.constant 16 : i32 loc(#loc13)
    %at_0 = tt.get_program_id x : i32 loc(#loc13)
    %at_1 = arith.muli %at_0, %at : i32 loc(#loc13)
    %at_2 = tt.make_range {end = 16 : i32, start = 0 : i32} : tensor<16xi32> loc(#loc14)
    %at_3 = tt.splat %at_1 : i32 -> tensor<16xi32> loc(#loc13)
    %at_4 = arith.addi %at_3, %at_2 : tensor<16xi32> loc(#loc13)
    %v = tt.splat %n : i32 -> tensor<16xi32> loc(#loc15)
    %v_5 = arith.cmpi slt, %at_4, %v : tensor<16xi32> loc(#loc15)
    %v_6 = tt.splat %x : !tt.ptr<f32> -> tensor<16x!tt.ptr<f32>> loc(#loc16)
    %v_7 = tt.addptr %v_6, %at_4 : tensor<16x!tt.ptr<f32>>, tensor<16xi32> loc(#loc16)
    %v_8 = tt.load %v_7, %v_5 : tensor<16x!tt.ptr<f32>> loc(#loc17)
    %v_9 = tt.splat %cos : !tt.ptr<f32> -> tensor<16x!tt.ptr<f32>> loc(#loc18)
    %v_10 = tt.addptr %v_9, %at_4 : tensor<16x!tt.ptr<f32>>, tensor<16xi32> loc(#loc18)
    %v_11 = tt.load %v_10, %v_5 : tensor<16x!tt.ptr<f32>> loc(#loc19)
    %v_12 = arith.mulf %v_8, %v_11 : tensor<16xf32> loc(#loc17)
    tt.store %v_7, %v_12, %v_5 : tensor<16x!tt.ptr<f32>> loc(#loc8)
    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
#loc1 = loc("kernels.py":6:10)
#loc2 = loc("kernels.py":6:34)
#loc3 = loc("kernels.py":7:30)
#loc4 = loc("kernels.py":7:17)
#loc5 = loc("kernels.py":7:9)
#loc6 = loc("kernels.py":7:48)
#loc7 = loc("kernels.py":7:40)
#loc8 = loc("kernels.py":8:5)
#loc13 = loc("at"(#loc1))
#loc14 = loc("at"(#loc2))
#loc15 = loc("v"(#loc3))
#loc16 = loc("v"(#loc4))
#loc17 = loc("v"(#loc5))
#loc18 = loc("v"(#loc6))
#loc19 = loc("v"(#loc7))
"""

# @triton.jit
# def turn(x, cos, out, n, INPLACE: tl.constexpr):
#     at = tl.program_id(0) * 16 + tl.arange(0, 16)
#     v = tl.load(x + at, mask=at < n) * tl.load(cos + at, mask=at < n)
#     tl.store((x if INPLACE else out) + at, v, mask=at < n)
# INPLACE=False
TURN = r"""
module {
  tt.func public @turn(%x: !tt.ptr<f32>, %cos: !tt.ptr<f32>, %out: !tt.ptr<f32>, %n: i32) attributes {noinline = false} {
    %at = arith.constant 16 : i32
    %at_0 = tt.get_program_id x : i32
    %at_1 = arith.muli %at_0, %at : i32
    %at_2 = tt.make_range {end = 16 : i32, start = 0 : i32} : tensor<16xi32>
    %at_3 = tt.splat %at_1 : i32 -> tensor<16xi32>
    %at_4 = arith.addi %at_3, %at_2 : tensor<16xi32>
    %v = tt.splat %n : i32 -> tensor<16xi32>
    %v_5 = arith.cmpi slt, %at_4, %v : tensor<16xi32>
    %v_6 = tt.splat %x : !tt.ptr<f32> -> tensor<16x!tt.ptr<f32>>
    %v_7 = tt.addptr %v_6, %at_4 : tensor<16x!tt.ptr<f32>>, tensor<16xi32>
    %v_8 = tt.load %v_7, %v_5 : tensor<16x!tt.ptr<f32>>
    %v_9 = tt.splat %cos : !tt.ptr<f32> -> tensor<16x!tt.ptr<f32>>
    %v_10 = tt.addptr %v_9, %at_4 : tensor<16x!tt.ptr<f32>>, tensor<16xi32>
    %v_11 = tt.load %v_10, %v_5 : tensor<16x!tt.ptr<f32>>
    %v_12 = arith.mulf %v_8, %v_11 : tensor<16xf32>
    %0 = tt.splat %out : !tt.ptr<f32> -> tensor<16x!tt.ptr<f32>>
    %1 = tt.addptr %0, %at_4 : tensor<16x!tt.ptr<f32>>, tensor<16xi32>
    tt.store %1, %v_12, %v_5 : tensor<16x!tt.ptr<f32>>
    tt.return
  }
}
"""

# @triton.jit
# def gather(x, index, total, out, n):
#     at = tl.arange(0, 16)
#     for i in range(0, tl.load(index)):
#         row = tl.load(index + i)
#         v = tl.load(x + row * 16 + at)
#         if row > 3:
#             tl.store(out + row * 16 + at, v)
#         else:
#             tl.atomic_add(total + row * 16 + at, v)
#         out += n
GATHER = r"""
module {
  tt.func public @gather(%x: !tt.ptr<f32>, %index: !tt.ptr<i32>, %total: !tt.ptr<f32>, %out: !tt.ptr<f32>, %n: i32) attributes {noinline = false} {
    %c1_i32 = arith.constant 1 : i32
    %c0_i32 = arith.constant 0 : i32
    %cst = arith.constant dense<true> : tensor<16xi1>
    %c3_i32 = arith.constant 3 : i32
    %c16_i32 = arith.constant 16 : i32
    %at = tt.make_range {end = 16 : i32, start = 0 : i32} : tensor<16xi32>
    %0 = tt.load %index : !tt.ptr<i32>
    %out_0 = scf.for %i = %c0_i32 to %0 step %c1_i32 iter_args(%out_1 = %out) -> (!tt.ptr<f32>)  : i32 {
      %row = tt.addptr %index, %i : !tt.ptr<i32>, i32
      %row_2 = tt.load %row : !tt.ptr<i32>
      %v = arith.muli %row_2, %c16_i32 : i32
      %v_3 = tt.addptr %x, %v : !tt.ptr<f32>, i32
      %v_4 = tt.splat %v_3 : !tt.ptr<f32> -> tensor<16x!tt.ptr<f32>>
      %v_5 = tt.addptr %v_4, %at : tensor<16x!tt.ptr<f32>>, tensor<16xi32>
      %v_6 = tt.load %v_5 : tensor<16x!tt.ptr<f32>>
      %1 = arith.cmpi sgt, %row_2, %c3_i32 : i32
      scf.if %1 {
        %2 = tt.addptr %out_1, %v : !tt.ptr<f32>, i32
        %3 = tt.splat %2 : !tt.ptr<f32> -> tensor<16x!tt.ptr<f32>>
        %4 = tt.addptr %3, %at : tensor<16x!tt.ptr<f32>>, tensor<16xi32>
        tt.store %4, %v_6 : tensor<16x!tt.ptr<f32>>
      } else {
        %2 = tt.addptr %total, %v : !tt.ptr<f32>, i32
        %3 = tt.splat %2 : !tt.ptr<f32> -> tensor<16x!tt.ptr<f32>>
        %4 = tt.addptr %3, %at : tensor<16x!tt.ptr<f32>>, tensor<16xi32>
        %5 = tt.atomic_rmw fadd, acq_rel, gpu, %4, %v_6, %cst : (tensor<16x!tt.ptr<f32>>, tensor<16xf32>, tensor<16xi1>) -> tensor<16xf32>
      }
      %out_7 = tt.addptr %out_1, %n : !tt.ptr<f32>, i32
      scf.yield %out_7 : !tt.ptr<f32>
    }
    tt.return
  }
}
"""

# @triton.jit
# def chosen(x, y, out, n):
#     p = x
#     if n > 4:
#         p = y
#     tl.store(p + tl.arange(0, 16), tl.load(out + tl.arange(0, 16)))
CHOSEN = r"""
module {
  tt.func public @chosen(%p: !tt.ptr<f32>, %p_0: !tt.ptr<f32>, %out: !tt.ptr<f32>, %n: i32) attributes {noinline = false} {
    %c4_i32 = arith.constant 4 : i32
    %0 = arith.cmpi sgt, %n, %c4_i32 : i32
    %1 = arith.select %0, %p_0, %p : !tt.ptr<f32>
    %2 = tt.make_range {end = 16 : i32, start = 0 : i32} : tensor<16xi32>
    %3 = tt.splat %1 : !tt.ptr<f32> -> tensor<16x!tt.ptr<f32>>
    %4 = tt.addptr %3, %2 : tensor<16x!tt.ptr<f32>>, tensor<16xi32>
    %5 = tt.splat %out : !tt.ptr<f32> -> tensor<16x!tt.ptr<f32>>
    %6 = tt.addptr %5, %2 : tensor<16x!tt.ptr<f32>>, tensor<16xi32>
    %7 = tt.load %6 : tensor<16x!tt.ptr<f32>>
    tt.store %4, %7 : tensor<16x!tt.ptr<f32>>
    tt.return
  }
}
"""

# @triton.jit
# def addresses(table, out):
#     p = tl.load(table).to(tl.pointer_type(tl.float32))
#     tl.store(p + tl.arange(0, 16), tl.load(out + tl.arange(0, 16)))
ADDRESSES = r"""
module {
  tt.func public @addresses(%table: !tt.ptr<i64>, %out: !tt.ptr<f32>) attributes {noinline = false} {
    %p = tt.load %table : !tt.ptr<i64>
    %p_0 = tt.int_to_ptr %p : i64 -> !tt.ptr<f32>
    %0 = tt.make_range {end = 16 : i32, start = 0 : i32} : tensor<16xi32>
    %1 = tt.splat %p_0 : !tt.ptr<f32> -> tensor<16x!tt.ptr<f32>>
    %2 = tt.addptr %1, %0 : tensor<16x!tt.ptr<f32>>, tensor<16xi32>
    %3 = tt.splat %out : !tt.ptr<f32> -> tensor<16x!tt.ptr<f32>>
    %4 = tt.addptr %3, %0 : tensor<16x!tt.ptr<f32>>, tensor<16xi32>
    %5 = tt.load %4 : tensor<16x!tt.ptr<f32>>
    tt.store %2, %5 : tensor<16x!tt.ptr<f32>>
    tt.return
  }
}
"""

# @triton.jit
# def until(x, lock, n):
#     while tl.atomic_cas(lock, 0, 1) == 1:
#         pass
#     p = x
#     while n > 0:
#         tl.store(p, 1.0)
#         p += n
#         n -= 1
UNTIL = r"""
module {
  tt.func public @until(%x: !tt.ptr<f32>, %lock: !tt.ptr<i32>, %n: i32) attributes {noinline = false} {
    %cst = arith.constant 1.000000e+00 : f32
    %c1_i32 = arith.constant 1 : i32
    %c0_i32 = arith.constant 0 : i32
    scf.while : () -> () {
      %0 = tt.atomic_cas acq_rel, gpu, %lock, %c0_i32, %c1_i32 : (!tt.ptr<i32>, i32, i32) -> i32
      %1 = arith.cmpi eq, %0, %c1_i32 : i32
      scf.condition(%1)
    } do {
      scf.yield
    }
    %p:2 = scf.while (%n_0 = %n, %p_1 = %x) : (i32, !tt.ptr<f32>) -> (i32, !tt.ptr<f32>) {
      %0 = arith.cmpi sgt, %n_0, %c0_i32 : i32
      scf.condition(%0) %n_0, %p_1 : i32, !tt.ptr<f32>
    } do {
    ^bb0(%n_0: i32, %p_1: !tt.ptr<f32>):
      tt.store %p_1, %cst : !tt.ptr<f32>
      %p_2 = tt.addptr %p_1, %n_0 : !tt.ptr<f32>, i32
      %n_3 = arith.subi %n_0, %c1_i32 : i32
      scf.yield %n_3, %p_2 : i32, !tt.ptr<f32>
    }
    tt.return
  }
}
"""

# @triton.jit
# def early(x, out, n):
#     if tl.program_id(0) > n:
#         return
#     s = tl.sum(tl.load(x + tl.arange(0, 16)))
#     tl.store(out, s)
EARLY = r"""
module {
  tt.func public @early(%x: !tt.ptr<f32>, %out: !tt.ptr<f32>, %n: i32) attributes {noinline = false} {
    %0 = tt.get_program_id x : i32
    %1 = arith.cmpi sgt, %0, %n : i32
    cf.cond_br %1, ^bb1, ^bb2
  ^bb1:  // pred: ^bb0
    tt.return
  ^bb2:  // pred: ^bb0
    %s = tt.make_range {end = 16 : i32, start = 0 : i32} : tensor<16xi32>
    %s_0 = tt.splat %x : !tt.ptr<f32> -> tensor<16x!tt.ptr<f32>>
    %s_1 = tt.addptr %s_0, %s : tensor<16x!tt.ptr<f32>>, tensor<16xi32>
    %s_2 = tt.load %s_1 : tensor<16x!tt.ptr<f32>>
    %s_3 = tt.reshape %s_2 allow_reorder : tensor<16xf32> -> tensor<16xf32>
    %s_4 = "tt.reduce"(%s_3) <{axis = 0 : i32}> ({
    ^bb0(%s_5: f32, %s_6: f32):
      %s_7 = arith.addf %s_5, %s_6 : f32
      tt.reduce.return %s_7 : f32
    }) : (tensor<16xf32>) -> f32
    tt.store %out, %s_4 : !tt.ptr<f32>
    tt.return
  }
}
"""

# @triton.jit
# def calls(x, out):
#     helper(out)  # which is not inlined, and stores to it
CALLS = r"""
module {
  tt.func public @calls(%x: !tt.ptr<f32>, %out: !tt.ptr<f32>) attributes {noinline = false} {
    tt.call @__main__.helper__Pfp32(%out) : (!tt.ptr<f32>) -> ()
    tt.return
  }
  tt.func private @__main__.helper__Pfp32(%p: !tt.ptr<f32>) attributes {noinline = true} {
    %cst = arith.constant 1.000000e+00 : f32
    tt.store %p, %cst : !tt.ptr<f32>
    tt.return
  }
}
"""

# @triton.jit
# def siblings(x, y, z, n):
#     if n > 1:
#         tl.store(x + n * 2, 1.0)
#     if n > 2:
#         tl.store(y + n * 3, 2.0)
#     if n > 3:
#         tl.store(z + n * 4 + tl.load(x).to(tl.int32), 3.0)
SIBLINGS = r"""
module {
  tt.func public @siblings(%x: !tt.ptr<f32>, %y: !tt.ptr<f32>, %z: !tt.ptr<f32>, %n: i32) attributes {noinline = false} {
    %cst = arith.constant 3.000000e+00 : f32
    %c4_i32 = arith.constant 4 : i32
    %cst_0 = arith.constant 2.000000e+00 : f32
    %c3_i32 = arith.constant 3 : i32
    %cst_1 = arith.constant 1.000000e+00 : f32
    %c2_i32 = arith.constant 2 : i32
    %c1_i32 = arith.constant 1 : i32
    %0 = arith.cmpi sgt, %n, %c1_i32 : i32
    scf.if %0 {
      %3 = arith.muli %n, %c2_i32 : i32
      %4 = tt.addptr %x, %3 : !tt.ptr<f32>, i32
      tt.store %4, %cst_1 : !tt.ptr<f32>
    }
    %1 = arith.cmpi sgt, %n, %c2_i32 : i32
    scf.if %1 {
      %3 = arith.muli %n, %c3_i32 : i32
      %4 = tt.addptr %y, %3 : !tt.ptr<f32>, i32
      tt.store %4, %cst_0 : !tt.ptr<f32>
    }
    %2 = arith.cmpi sgt, %n, %c3_i32 : i32
    scf.if %2 {
      %3 = arith.muli %n, %c4_i32 : i32
      %4 = tt.addptr %z, %3 : !tt.ptr<f32>, i32
      %5 = tt.load %x : !tt.ptr<f32>
      %6 = arith.fptosi %5 : f32 to i32
      %7 = tt.addptr %4, %6 : !tt.ptr<f32>, i32
      tt.store %7, %cst : !tt.ptr<f32>
    }
    tt.return
  }
}
"""

# @triton.jit
# def norm(x, out, scale):
#     at = tl.arange(0, 16)
#     v = tl.load(x + tl.program_id(0) * 16 + at)
#     s = 1.0 / tl.sqrt(tl.sum(v * v))
#     tl.store(scale + tl.program_id(0), s)
#     tl.store(out + tl.program_id(0) * 16 + at, v * s)
NORM = r"""
module {
  tt.func public @norm(%x: !tt.ptr<f32>, %out: !tt.ptr<f32>, %scale: !tt.ptr<f32>) attributes {noinline = false} {
    %s = arith.constant 1.000000e+00 : f32
    %c16_i32 = arith.constant 16 : i32
    %at = tt.make_range {end = 16 : i32, start = 0 : i32} : tensor<16xi32>
    %v = tt.get_program_id x : i32
    %v_0 = arith.muli %v, %c16_i32 : i32
    %v_1 = tt.addptr %x, %v_0 : !tt.ptr<f32>, i32
    %v_2 = tt.splat %v_1 : !tt.ptr<f32> -> tensor<16x!tt.ptr<f32>>
    %v_3 = tt.addptr %v_2, %at : tensor<16x!tt.ptr<f32>>, tensor<16xi32>
    %v_4 = tt.load %v_3 : tensor<16x!tt.ptr<f32>>
    %s_5 = arith.mulf %v_4, %v_4 : tensor<16xf32>
    %s_6 = tt.reshape %s_5 allow_reorder : tensor<16xf32> -> tensor<16xf32>
    %s_7 = "tt.reduce"(%s_6) <{axis = 0 : i32}> ({
    ^bb0(%s_10: f32, %s_11: f32):
      %s_12 = arith.addf %s_10, %s_11 : f32
      tt.reduce.return %s_12 : f32
    }) : (tensor<16xf32>) -> f32
    %s_8 = math.sqrt %s_7 : f32
    %s_9 = arith.divf %s, %s_8 : f32
    %0 = tt.addptr %scale, %v : !tt.ptr<f32>, i32
    tt.store %0, %s_9 : !tt.ptr<f32>
    %1 = tt.addptr %out, %v_0 : !tt.ptr<f32>, i32
    %2 = tt.splat %1 : !tt.ptr<f32> -> tensor<16x!tt.ptr<f32>>
    %3 = tt.addptr %2, %at : tensor<16x!tt.ptr<f32>>, tensor<16xi32>
    %4 = tt.splat %s_9 : f32 -> tensor<16xf32>
    %5 = arith.mulf %v_4, %4 : tensor<16xf32>
    tt.store %3, %5 : tensor<16x!tt.ptr<f32>>
    tt.return
  }
}
"""

# @triton.jit
# def apart(x, y):
#     tl.store(x + (y.to(tl.int64) - x.to(tl.int64)) // 4, 1.0)
APART = r"""
module {
  tt.func public @apart(%x: !tt.ptr<f32>, %y: !tt.ptr<f32>) attributes {noinline = false} {
    %cst = arith.constant 1.000000e+00 : f32
    %c4_i64 = arith.constant 4 : i64
    %0 = tt.ptr_to_int %y : !tt.ptr<f32> -> i64
    %1 = tt.ptr_to_int %x : !tt.ptr<f32> -> i64
    %2 = arith.subi %0, %1 : i64
    %3 = arith.divsi %2, %c4_i64 : i64
    %4 = tt.addptr %x, %3 : !tt.ptr<f32>, i64
    tt.store %4, %cst : !tt.ptr<f32>
    tt.return
  }
}
"""

# @triton.jit
# def from_nothing(x, table):
#     base = tl.full((), 0, tl.int64).to(tl.pointer_type(tl.float32))
#     tl.store(base + tl.load(table) // 4, tl.load(x))
FROM_NOTHING = r"""
module {
  tt.func public @from_nothing(%x: !tt.ptr<f32>, %table: !tt.ptr<i64>) attributes {noinline = false} {
    %c4_i64 = arith.constant 4 : i64
    %c0_i64 = arith.constant 0 : i64
    %base = tt.int_to_ptr %c0_i64 : i64 -> !tt.ptr<f32>
    %0 = tt.load %table : !tt.ptr<i64>
    %1 = arith.divsi %0, %c4_i64 : i64
    %2 = tt.addptr %base, %1 : !tt.ptr<f32>, i64
    %3 = tt.load %x : !tt.ptr<f32>
    tt.store %2, %3 : !tt.ptr<f32>
    tt.return
  }
}
"""

# @triton.jit
# def by_assembly(x, y):
#     tl.inline_asm_elementwise("st.global.f32 [$1], 0f3F800000; mov.u32 $0, 0;", "=r,l",
#                               [y.to(tl.int64)], tl.int32, is_pure=False, pack=1)
BY_ASSEMBLY = r"""
module {
  tt.func public @by_assembly(%x: !tt.ptr<f32>, %y: !tt.ptr<f32>) attributes {noinline = false} {
    %v = tt.ptr_to_int %y : !tt.ptr<f32> -> i64
    %v_0 = tt.elementwise_inline_asm "st.global.f32 [$1], 0f3F800000; mov.u32 $0, 0;" {constraints = "=r,l", packed_element = 1 : i32, pure = false} %v : i64 -> i32
    tt.return
  }
}
"""

# @triton.jit
# def handed_on(a, b, c, n):
#     p, q = a, b
#     for i in range(n):
#         p, q = q, c
#     tl.store(p, 1.0)
HANDED_ON = r"""
module {
  tt.func public @handed_on(%a: !tt.ptr<f32>, %b: !tt.ptr<f32>, %c: !tt.ptr<f32>, %n: i32) attributes {noinline = false} {
    %cst = arith.constant 1.000000e+00 : f32
    %c0_i32 = arith.constant 0 : i32
    %c1_i32 = arith.constant 1 : i32
    %q:2 = scf.for %i = %c0_i32 to %n step %c1_i32 iter_args(%p = %a, %q_0 = %b) -> (!tt.ptr<f32>, !tt.ptr<f32>)  : i32 {
      scf.yield %q_0, %c : !tt.ptr<f32>, !tt.ptr<f32>
    }
    tt.store %q#0, %cst : !tt.ptr<f32>
    tt.return
  }
}
"""
