"""What the kernels call in their checking form, in LLVM's language: nothing here is part of the code that serves.

`paceline_check` looks up every address before it is used. One that no range of the table holds is counted and kept,
and the caller reads or writes a place where it does no harm: the runner raises after the step. `paceline_pause` stands
at every piece and every meeting, and lets other threads go first at random. `layout` describes the table.
"""

from __future__ import annotations

from paceline.runner.native import layout as at

TEXT = f"""
@paceline_table = internal global i64 0

declare i32 @sched_yield()

define void @paceline_allow(i64 %table) {{
  store atomic i64 %table, ptr @paceline_table release, align 8
  ret void
}}

define i64 @paceline_check(i64 %at, i64 %size, i64 %writes) noinline {{
  %table = load atomic i64, ptr @paceline_table acquire, align 8
  %any = icmp ne i64 %table, 0
  br i1 %any, label %search, label %good
search:
  %head = inttoptr i64 %table to ptr
  %count = load i64, ptr %head
  %ranges = getelementptr i8, ptr %head, i64 {at.C_RANGES}
  %end = add i64 %at, %size
  br label %look
look:
  %low = phi i64 [ 0, %search ], [ %new_low, %halve ]
  %high = phi i64 [ %count, %search ], [ %new_high, %halve ]
  %more = icmp ult i64 %low, %high
  br i1 %more, label %halve, label %found
halve:
  %sum = add i64 %low, %high
  %middle = lshr i64 %sum, 1
  %entry = getelementptr [3 x i64], ptr %ranges, i64 %middle
  %start = load i64, ptr %entry
  %is_before = icmp ule i64 %start, %at
  %next = add i64 %middle, 1
  %new_low = select i1 %is_before, i64 %next, i64 %low
  %new_high = select i1 %is_before, i64 %high, i64 %middle
  br label %look
found:
  %none = icmp eq i64 %low, 0
  br i1 %none, label %miss, label %compare
compare:
  %last = sub i64 %low, 1
  %limit_at = getelementptr [3 x i64], ptr %ranges, i64 %last, i64 1
  %limit = load i64, ptr %limit_at
  %writable_at = getelementptr [3 x i64], ptr %ranges, i64 %last, i64 2
  %writable = load i64, ptr %writable_at
  %fits = icmp ule i64 %end, %limit
  %may = icmp uge i64 %writable, %writes
  %right = and i1 %fits, %may
  br i1 %right, label %good, label %miss
miss:
  %misses = getelementptr i8, ptr %head, i64 {at.C_MISSES}
  %before = atomicrmw add ptr %misses, i64 1 seq_cst
  %missed_at = getelementptr i8, ptr %head, i64 {at.C_MISSED_AT}
  store i64 %at, ptr %missed_at
  %missed_size = getelementptr i8, ptr %head, i64 {at.C_MISSED_SIZE}
  store i64 %size, ptr %missed_size
  %missed_writes = getelementptr i8, ptr %head, i64 {at.C_MISSED_WRITES}
  store i64 %writes, ptr %missed_writes
  %harmless = add i64 %table, {at.C_HARMLESS}
  ret i64 %harmless
good:
  ret i64 %at
}}

define void @paceline_pause() noinline {{
  %table = load atomic i64, ptr @paceline_table acquire, align 8
  %any = icmp ne i64 %table, 0
  br i1 %any, label %read, label %done
read:
  %head = inttoptr i64 %table to ptr
  %seed_at = getelementptr i8, ptr %head, i64 {at.C_YIELDS}
  %seed = load i64, ptr %seed_at
  %wanted = icmp ne i64 %seed, 0
  br i1 %wanted, label %draw, label %done
draw:
  %drawn = getelementptr i8, ptr %head, i64 {at.C_DRAWN}
  %number = atomicrmw add ptr %drawn, i64 1 seq_cst
  %mixed = add i64 %number, %seed
  %spread = mul i64 %mixed, -7046029254386353131
  %folded = lshr i64 %spread, 29
  %crossed = xor i64 %spread, %folded
  %again = mul i64 %crossed, -4658895280553007687
  %random = lshr i64 %again, 40
  %kind = and i64 %random, 3
  switch i64 %kind, label %done [ i64 0, label %yield
                                  i64 1, label %linger ]
yield:
  %ignored = call i32 @sched_yield()
  br label %done
linger:
  %rest = lshr i64 %random, 2
  %looks = and i64 %rest, 4095
  br label %again_linger
again_linger:
  %left = phi i64 [ %looks, %linger ], [ %fewer, %again_linger ]
  %look = load volatile i64, ptr %seed_at
  %fewer = sub i64 %left, 1
  %over = icmp sle i64 %fewer, 0
  br i1 %over, label %done, label %again_linger
done:
  ret void
}}
"""
