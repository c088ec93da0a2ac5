/* A device that is busy for some time, as a library that MLX takes for Open MPI.
 *
 * mx.distributed.all_sum calls MPI_Allreduce in the thread of its stream, after its input is
 * there. This one sleeps and returns the input, so that nothing but time passes, and no core is
 * used. */

#define _GNU_SOURCE
#include <string.h>
#include <time.h>

static long long busy_ns = 0;

void set_busy_ns(long long ns) { __atomic_store_n(&busy_ns, ns, __ATOMIC_RELAXED); }

int MPI_Allreduce(const void* in, void* out, int count, void* type, void* op, void* comm) {
  (void)op, (void)comm;
  long long ns = __atomic_load_n(&busy_ns, __ATOMIC_RELAXED);
  struct timespec rest = {ns / 1000000000, ns % 1000000000};
  while (nanosleep(&rest, &rest)) {
  }
  /* Open MPI's MPI_IN_PLACE is 1. A datatype is a symbol below, which holds its size. */
  if (in != (void*)1) {
    memcpy(out, in, (size_t)count * *(int*)type);
  }
  return 0;
}

/* Two processes, of which this is the first: MLX leaves out what one alone need not do. */
int MPI_Comm_rank(void* comm, int* rank) { (void)comm; return *rank = 0; }
int MPI_Comm_size(void* comm, int* size) { (void)comm; *size = 2; return 0; }
int MPI_Init(int* argc, char*** argv) { (void)argc, (void)argv; return 0; }
int MPI_Finalize(void) { return 0; }

int MPI_Get_library_version(char* version, int* length) {
  strcpy(version, "Open MPI, a stand-in");
  *length = (int)strlen(version);
  return 0;
}

/* MLX makes datatypes of its own for halves, which this device is not asked for. */
int MPI_Type_contiguous(int count, void* type, void** made) {
  (void)count; *made = type; return 0;
}
int MPI_Type_commit(void** type) { (void)type; return 0; }
int MPI_Op_create(void* function, int commute, void** made) {
  (void)function, (void)commute; *made = 0; return 0;
}

/* Looked up, and never called here. */
int MPI_Allgather(void) { return 1; }
int MPI_Comm_free(void) { return 1; }
int MPI_Comm_split(void) { return 1; }
int MPI_Recv(void) { return 1; }
int MPI_Send(void) { return 1; }

int ompi_mpi_comm_world, ompi_mpi_op_max, ompi_mpi_op_min, ompi_mpi_op_sum;
int ompi_mpi_c_bool = 1, ompi_mpi_int8_t = 1, ompi_mpi_uint8_t = 1;
int ompi_mpi_int16_t = 2, ompi_mpi_uint16_t = 2;
int ompi_mpi_int32_t = 4, ompi_mpi_uint32_t = 4, ompi_mpi_float = 4;
int ompi_mpi_int64_t = 8, ompi_mpi_uint64_t = 8, ompi_mpi_double = 8, ompi_mpi_c_complex = 8;
