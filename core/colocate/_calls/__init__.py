"""The driver's side of calls: order, holds, deadlines and residents."""
